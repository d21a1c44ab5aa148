"""The outcomes of each matrix entry's tests: `make matrix` writes them, the reference page links to them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

FILE: Final = Path(__file__).with_suffix(".json")


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test, with all of its parameters."""

    features: list[str]
    """The entries of the matrix that the test shows."""
    outcome: str
    """`passed`, or `failed` or `skipped` if that befell one of its parameters."""


class Outcomes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `FILE`."""

    sglang: str
    """The version of SGLang that they ran with."""
    tests: dict[str, Outcome]
    """By `path::function`."""


def read() -> Outcomes:
    """The recorded outcomes."""
    return msgspec.json.decode(FILE.read_bytes(), type=Outcomes)


def write(outcomes: Outcomes) -> None:
    """Replace the recorded outcomes."""
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)) + b"\n")
