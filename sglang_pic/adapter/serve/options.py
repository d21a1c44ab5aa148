"""The options of a request, in `custom_params: {"pic": {"mode": "off", "seam_tokens": 8, "pin": "a skill"}}`.

The front end parses the options to answer HTTP 400; the scheduler parses them again, because a request can reach it
another way.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

import msgspec

from sglang_pic.core import PRESETS, ReusePolicy
from sglang_pic.errors import ConfigError
from sglang_pic.settings import settings_of

MAX_TOKENS = 4096
MAX_TTL_S = 7 * 24 * 3600
FIRM = 100
"""The highest priority of a pin, and that of a pin without one."""


class Mode(Enum):
    """How a request may be served."""

    AUTO = "auto"
    OFF = "off"


class Skills(Enum):
    """Where pinned rows may be spliced."""

    FAR = "far"
    """Where other rows may: the context rule applies."""
    NEAR = "near"
    """Also near the prompt's end."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed options."""

    mode: Mode | None = None
    """`None` for the server's own."""
    overrides: dict[str, int | str] = {}
    """Settings of the reuse policy that this request sets."""
    skills: Skills = Skills.FAR
    pin: str | None = None
    """The name under which the prompt is pinned when the request has finished."""
    pin_ttl_s: int | None = None
    """Seconds from the end of the request after which its pin is released; `None` for no such time."""
    pin_priority: int = FIRM
    """Pins with a lower priority are released first, if memory is short."""
    unpin: str | None = None
    """The name of a pin that is released when the request has finished."""

    def policy(self, server: ReusePolicy) -> ReusePolicy:
        """The reuse policy of this request on a server with the policy `server`."""
        preset = self.overrides.get("preset", server.preset)
        base = server if preset == server.preset else ReusePolicy(**PRESETS[str(preset)])
        return msgspec.structs.replace(base, **self.overrides) if self.overrides else server

    def lane(self, server: ReusePolicy) -> str | None:
        """The lane of the request's `preset` and `edit`; `None` if both are the server's own."""
        policy = self.policy(server)
        asked = [name for name in ("preset", "edit") if getattr(policy, name) != getattr(server, name)]
        return " ".join(getattr(policy, name) for name in asked) or None


_Choice = TypeVar("_Choice", bound=Enum)
_PIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
SETTINGS = {
    name: setting._replace(range=setting.range and setting.range._replace(high=MAX_TOKENS))
    for name, setting in settings_of(ReusePolicy).items()
    if name in ("preset", "seam_tokens", "tail_tokens", "edit")
}
"""The settings of the reuse policy that a request may set, with the bounds for requests."""
INTEGERS = {"pin_ttl_s": (1, MAX_TTL_S), "pin_priority": (0, FIRM)}
"""Options of a pin, with the least and the greatest value."""
_KEYS = ("mode", *SETTINGS, "skills", "pin", *INTEGERS, "unpin")


def parse_options(custom_params: object) -> RequestOptions:
    """Parse the options in a request's `custom_params`, under the key `pic`.

    Raises:
        ConfigError: it names the value, the allowed ones and what to do.
    """
    if not isinstance(custom_params, Mapping) or custom_params.get("pic") is None:
        return RequestOptions()
    options = custom_params["pic"]
    if not isinstance(options, Mapping):
        raise ConfigError(f'custom_params.pic={shown(options)}: must be an object such as {{"mode": "auto"}}.')
    unknown = sorted(str(key) for key in options if key not in _KEYS)
    if unknown:
        raise ConfigError(
            f"custom_params.pic has the unknown key {shown(unknown[0])}: allowed are {', '.join(map(repr, _KEYS))}."
        )
    overrides = {name: options[name] for name in SETTINGS if options.get(name) is not None}
    for name, value in overrides.items():
        setting = SETTINGS[name]
        if not setting.allows(value):
            raise ConfigError(
                f"custom_params.pic.{name}={shown(value)}: must be {setting.allowed}; leave it out for the server's "
                "setting."
            )
    return RequestOptions(
        mode=_choice(options, "mode", Mode),
        overrides=overrides,
        skills=_choice(options, "skills", Skills) or Skills.FAR,
        pin=_pin_name(options, "pin"),
        unpin=_pin_name(options, "unpin"),
        **_of_pin(options),
    )


def shown(value: object) -> str:
    """A short representation of a value for errors: clients can send megabytes."""
    text = reprlib.Repr()
    text.maxlevel, text.maxstring, text.maxother = 2, 100, 100
    return text.repr(value)


def _choice(options: Mapping[str, object], key: str, kind: type[_Choice]) -> _Choice | None:
    if key not in options:
        return None
    allowed = {member.value: member for member in kind}
    value = options[key]
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(
            f"custom_params.pic.{key}={shown(value)}: must be one of {', '.join(map(repr, allowed))}; "
            "leave it out for the server's default."
        )
    return allowed[value]


def _pin_name(options: Mapping[str, object], key: str) -> str | None:
    value = options.get(key)
    if value is not None and not (isinstance(value, str) and _PIN_NAME.fullmatch(value)):
        raise ConfigError(
            f"custom_params.pic.{key}={shown(value)}: must be a name of 1 to 128 letters, digits, '.', '_' and '-' "
            "(ASCII); choose another one, or leave it out."
        )
    return value


def _of_pin(options: Mapping[str, object]) -> dict[str, int]:
    found = {}
    for key, (low, high) in INTEGERS.items():
        value = options.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"custom_params.pic.{key}={shown(value)}: must be an integer from {low} to {high}.")
        if options.get("pin") is None:
            raise ConfigError(f"custom_params.pic.{key}={value}: allowed only beside `pin`, whose name it needs.")
        found[key] = value
    return found
