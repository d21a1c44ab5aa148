"""What is varied over a TRACE: policies, by name, and the order of its sessions.

Owns how a policy and an order are written on the command line, and the default policies. It must not know requests.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import msgspec

from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.record import Donors
from sglang_pic.core import ReusePolicy
from sglang_pic.core.settings import settings_of
from sglang_pic.errors import ConfigError

__all__ = ["DEFAULT_POLICIES", "RECORDED", "parse_order", "parse_policy", "place_sessions"]

RECORDED = "recorded"
REVERSED = "reversed"

DEFAULT_POLICIES = (
    "default",
    "most-reuse=seam:1,min_spliced:8,tail:0",
    "no-tail=tail:0",
    "tail-128=tail:128",
    "tail-256=tail:256",
    "pieces=min_spliced:8",
    "seam-1=seam:1",
    "seam-16=seam:16",
)
"""The first one says which calls are measured."""

_SHUFFLED = re.compile(r"shuffled-[1-9][0-9]{0,3}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SETTINGS = {declared.short_name: declared for declared in settings_of(ReusePolicy).values()}
_TAKEN = ("full", "retest", "exact", "naive")


def parse_policy(text: str) -> Arm:
    """Read `NAME` or `NAME=seam:8,min_run:128,tail:64`; what is left out is the server's own.

    Raises:
        ConfigError: naming the part, what is allowed and what to do.
    """
    name, _, settings = text.partition("=")
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise ConfigError(f"--policy {text!r}: the name must be letters, digits, '.', '_' or '-', and no control's.")
    values: dict[str, int] = {}
    for part in settings.split(",") if settings else []:
        key, _, value = part.partition(":")
        if key not in _SETTINGS or not value.isdigit():
            raise ConfigError(
                f"--policy {text!r}: {part!r} must be one of {', '.join(_SETTINGS)}, a colon and a number."
            )
        values[_SETTINGS[key].name] = int(value)
    try:
        msgspec.convert(values, ReusePolicy)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--policy {text!r}: {error}") from error
    return Arm(name=name, donors=Donors.TRACE, overrides=values)


def parse_order(text: str) -> str:
    """Check an order of sessions: `recorded`, `reversed`, or `shuffled-N`, one seeded order for each N.

    What repeats is spliced from whoever came first, so that each order has donors of its own.

    Raises:
        ConfigError: naming the value and what is allowed.
    """
    if text not in (RECORDED, REVERSED) and not _SHUFFLED.fullmatch(text):
        raise ConfigError(f"--order {text!r}: must be {RECORDED}, {REVERSED}, or shuffled-N with N from 1 to 9999.")
    return text


def place_sessions(sessions: Iterable[int], order: str) -> dict[int, int]:
    """Every session's place in an order. The same sessions have the same places in every run."""
    ordered = sorted(set(sessions), reverse=order == REVERSED)
    if _SHUFFLED.fullmatch(order):
        random.Random(order).shuffle(ordered)
    return {session: place for place, session in enumerate(ordered)}
