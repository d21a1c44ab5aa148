"""The record of a prompt under one arm, and its file."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt under one arm; tokens are those behind the exact prefix."""

    kind: str
    prompt: str
    arm: str
    tokens: int
    spliced: int
    """Of these, rows of a donor when the answer begins."""
    again: int
    """Computed in both passes: the seams of what pass two computes whole, and the end."""
    kept: bool
    """Every token of the full prefill's answer is the likeliest one."""
    right: bool
    """By the kind's judge; where it has none, whether no token but ties is another one."""
    kl: float
    """Mean over the answer of KL(full prefill || arm), nats."""
    worst: float
    """The largest of them."""
    sure: int
    flips: int
    """Of the sure tokens, those that another one beats here."""
    answer: int
    """Tokens of the answer."""
    lead: float = 0.0
    """Of the tokens where another one is likelier than in the full prefill, how far that one was behind there, nats;
    the largest."""
    recovery: float | None = None
    """Of `fields`: how far the answer moved from the old one (0) to the full prefill's (1), in log odds."""


def read(path: Path) -> list[Record]:
    """The records of a file, which may be packed by gzip; none where there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    return [msgspec.json.decode(line, type=Record) for line in lines if line]
