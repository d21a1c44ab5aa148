"""Flags for the servers that a verb starts, checked by name before any is started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sglang_pic.errors import ConfigError, did_you_mean

_FIELD = re.compile(r"^    (\w+):", re.MULTILINE)
_LITERAL = re.compile(r"--([a-z0-9-]+)")


def server_flags(texts: Sequence[str], further: Sequence[str] = ()) -> tuple[str, ...]:
    """The words of each `--server-arg`, and `further` words.

    Raises:
        ConfigError: no flag of the installed SGLang begins like one of them. Values are SGLang's to check.
    """
    words = (*(word for text in texts for word in shlex.split(text)), *further)
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    known = _names() if flags else set()
    for flag in flags:
        if not any(name.startswith(flag.removeprefix("no-")) for name in known):
            hint = did_you_mean(f"--{flag}", (f"--{name}" for name in known))
            raise ConfigError(f"server flag --{flag}: SGLang has none of this name{hint}; correct it or leave it out.")
    return words


def _names() -> set[str]:
    """What may be a flag by the sources of SGLang's arguments: to ask the parser takes as long as a server's start."""
    found = find_spec("sglang")
    assert found is not None, "the verb needs SGLang"
    assert found.origin is not None
    folder = Path(found.origin).with_name("srt")
    sources = [folder / "server_args.py", *(folder / "arg_groups").rglob("*.py")]
    texts = [path.read_text("utf8") for path in sources]
    return {name.replace("_", "-") for text in texts for name in (*_FIELD.findall(text), *_LITERAL.findall(text))}
