"""How a call is served: the controls, and the policies that a run compares with them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sglang_pic.core import ReusePolicy, with_preset
from sglang_pic.errors import ConfigError
from sglang_pic.settings import settings_of


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve a prompt."""

    name: str
    is_control: bool = False
    """Nothing is spliced."""
    rotate: bool = True
    flip: bool = False
    """Turn the signs of every spliced row, which does harm wherever the text stands."""
    overrides: dict[str, int | str] = {}
    """Settings of the reuse policy; the server's hold for the others."""


FULL, RETEST, EXACT = CONTROLS = tuple(Arm(name=name, is_control=True) for name in ("full", "retest", "exact"))

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

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SETTINGS = settings_of(ReusePolicy)
_SHORT = {name.removesuffix("_tokens"): name for name in _SETTINGS}
_TAKEN = (*(arm.name for arm in CONTROLS), "naive")


def parse_policy(text: str) -> Arm:
    """Read `NAME` or `NAME=seam_tokens:8,edit:notes`, with units or without (`seam:8`).

    Settings that are left out stay the server's.

    Raises:
        ConfigError: naming the part, the allowed values and the remedy.
    """
    name, _, settings = text.partition("=")
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise ConfigError(f"--policy {text!r}: the name must be letters, digits, '.', '_' or '-', and no control's.")
    values: dict[str, Any] = {}
    for part in settings.split(",") if settings else []:
        key, _, value = part.partition(":")
        key = _SHORT.get(key, key)
        if key not in _SETTINGS or not value:
            raise ConfigError(
                f"--policy {text!r}: {part!r} must be one of {', '.join(_SETTINGS)}, a colon and its value."
            )
        values[key] = value
    try:
        policy = msgspec.convert(values := with_preset(values), ReusePolicy, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--policy {text!r}: {error}") from error
    return Arm(name=name, overrides={setting: getattr(policy, setting) for setting in values})
