"""Reads the rules for states from a model's `config.json`, as SGLang 0.5.23 does; no other file of it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from sglang_pic.census.states import StateRules, Strategy
from sglang_pic.errors import ConfigError

NO_BUFFER_ARCHITECTURES: Final = frozenset(
    {
        "GigaChat35ForCausalLM",
        "GigaChat35ForCausalLMNextN",
        "InternS2MobiusForConditionalGeneration",
        "JetNemotronForCausalLM",
        "JetVLMForConditionalGeneration",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "ZayaForCausalLM",
    }
)
"""For these `auto` chooses `no_buffer` (`arg_groups/overrides.py`, `configs/linear_attn_model_registry.py`)."""

# `mamba_cache_chunk_size` in `arg_groups/overrides.py` asks the configuration's class, which may have its own value.
_FIXED: Final = {"mamba": 256, "falcon_mamba": 256, "lfm2": 1, "lfm2_moe": 1, "lfm2_vl": 1, "zaya": 1}
_MAMBA_2: Final = {
    "falcon_h1": ("mamba_chunk_size",),
    "granitemoehybrid": ("mamba_chunk_size",),
    "mamba2": ("chunk_size",),
    "nemotron_h": ("mamba_chunk_size", "chunk_size"),
    "nemotron_h_puzzle": ("mamba_chunk_size", "chunk_size"),
}


def state_rules(folder: Path) -> StateRules:
    """The rules of a server of a model, with the choice of SGLang's `auto`, unless overlap is off and pages are 1.

    Args:
        folder: with a `config.json`; without one the rules are those of linear attention.

    Raises:
        ConfigError: the file is not a JSON object, or the chunk size not a number.
    """
    path = folder / "config.json"
    if not path.is_file():
        return StateRules()
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: not a model's configuration ({error}).") from error
    no_buffer = NO_BUFFER_ARCHITECTURES.intersection(config.get("architectures") or ())
    return StateRules(
        strategy=Strategy.NO_BUFFER if no_buffer else Strategy.EXTRA_BUFFER,
        mamba_chunk_size=_chunk_size(config, path),
    )


def _chunk_size(config: dict[str, Any], path: Path) -> int:
    kind = str(config.get("model_type"))
    if kind in _FIXED:
        return _FIXED[kind]
    for name in _MAMBA_2.get(kind, ("mamba_chunk_size",)):
        if (size := config.get(name)) is not None:
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{path}: {name}={size!r}: must be a number, 1 or more.")
            return size
    return 256 if kind in _MAMBA_2 else 64
