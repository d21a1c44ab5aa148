"""Known nonces of agents, in `nonces.toml`: what they look like, and prompts without them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from typing import Final, NamedTuple


class Nonce(NamedTuple):
    """One known nonce; the fields are those of `nonces.toml`."""

    title: str
    place: str
    kept: str
    removed: str
    switch: str
    """What makes the agent leave it out."""
    thread: str
    """Where it was reported."""
    within: int = 1 << 30
    """Characters of a prompt within which it begins."""

    def is_at(self, place: int, text: str) -> bool:
        """Whether a place in a text is one of its characters."""
        return any(one.end(1) <= place < one.end() for one in re.finditer(f"({self.kept}){self.removed}", text))

    def strip(self, text: str) -> str:
        """The text without it."""
        found = re.search(f"({self.kept}){self.removed}", text)
        if found is None or found.start() > self.within:
            return text
        return text[: found.end(1)] + text[found.end() :]


NONCES: Final = {
    name: Nonce(**fields)
    for name, fields in tomllib.loads((files("sglang_pic") / "nonces.toml").read_text(encoding="utf8")).items()
}
"""The known nonces by name."""


def strip(text: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """The text without the nonces of these names, and the names of those that it had."""
    found = []
    for name in names:
        if (stripped := NONCES[name].strip(text)) != text:
            text = stripped
            found.append(name)
    return text, found
