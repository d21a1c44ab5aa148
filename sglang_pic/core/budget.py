"""What the steps of planning cost, in tokens compared (about 20 ns each), and how much one plan may cost."""

from __future__ import annotations

from typing import Final

_ALLOWED_PER_TOKEN: Final = 32
_ALLOWED_FLOOR: Final = 1 << 16

PER_NODE: Final = 4
"""Visiting a node."""
PER_FURTHER_NODE: Final = 16
"""Going on with a comparison in another node."""
COPIED_TOKENS: Final = 64
"""Tokens that are copied at the cost of comparing one."""
PER_DONOR: Final = 64
"""Taking up a donor."""
PER_ENDING: Final = 16
"""Looking an ending up."""
PER_NAME: Final = 8
"""Hashing a chunk."""
PER_WALK_STEP: Final = 256
"""A step of the walk back over a donor's context."""
PER_FIELD: Final = 4
"""A field that was found before."""
PAIRS: Final = 16
"""Pairs of a token of the one side and one of the other that are compared at the cost of one."""


def allowed(num_tokens: int) -> int:
    """The most that a plan for `num_tokens` tokens may cost."""
    return _ALLOWED_FLOOR + _ALLOWED_PER_TOKEN * num_tokens
