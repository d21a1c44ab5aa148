"""Checks the folder of a model before SGLang is imported, which takes much longer."""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Final

from sglang_pic.errors import ConfigError, UnsupportedError

_COUNTS: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


def check_model(model: str) -> None:
    """Check the model argument of `sglang serve`; a name on the hub is not looked up.

    Raises:
        ConfigError: there is no such folder, or it has no config.json.
        UnsupportedError: its config.json is no JSON object, or names and counts in it are none.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model={model!r}: the folder has no config.json; name the folder of a checkpoint.")
        _check_config(path / "config.json")
    elif model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(
            f"model={model!r}: no such folder; name the folder of a checkpoint, or owner/name on the hub."
        )


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedError(
            f"{path}: cannot be read as JSON: {error}; copy it from the checkpoint again."
        ) from error
    if not isinstance(config, dict):
        raise UnsupportedError(f"{path}: holds {reprlib.repr(config)} instead of an object; name another checkpoint.")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise UnsupportedError(f"{path}: architectures={reprlib.repr(names)}: must be a list of names; correct it.")
    for name in _COUNTS:
        value = config.get(name)
        # Some models have a list, a value for each layer.
        is_count = isinstance(value, int | float) and 1 <= value < math.inf
        if value is not None and not isinstance(value, list) and not is_count:
            raise UnsupportedError(f"{path}: {name}={reprlib.repr(value)}: must be 1 or more; name another checkpoint.")
