"""What a request asks for: `custom_params: {"pic": {"mode": "auto" | "off", "edit": "recompile", "seam_tokens": k}}`.

The front end parses the options to answer HTTP 400; the scheduler parses them again, because a request can reach it
another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from sglang_pic.core import ReusePolicy
from sglang_pic.core.settings import settings_of
from sglang_pic.errors import ConfigError

MAX_TOKENS = 4096


class Mode(Enum):
    """How a request may be served."""

    AUTO = "auto"
    OFF = "off"


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed options."""

    mode: Mode = Mode.AUTO
    overrides: dict[str, int | str] = {}
    """Settings of the reuse policy that this request sets; the server's hold for the others."""

    def policy(self, server: ReusePolicy) -> ReusePolicy:
        """The reuse policy of this request on a server with the policy `server`."""
        return msgspec.structs.replace(server, **self.overrides) if self.overrides else server

    def lane(self, server: ReusePolicy) -> str | None:
        """The lane that the `edit` policy asks for; `None` where it is the server's own."""
        edit = self.policy(server).edit
        return None if edit == server.edit else edit


_MODES = ", ".join(repr(mode.value) for mode in Mode)
SETTINGS = {
    name: setting._replace(range=setting.range and setting.range._replace(high=MAX_TOKENS))
    for name, setting in settings_of(ReusePolicy).items()
    if name in ("seam_tokens", "tail_tokens", "edit")
}
"""The settings of the reuse policy that a request may set, with the bounds that hold for requests."""


def parse_options(custom_params: object) -> RequestOptions:
    """Parse the options out of a request's `custom_params`, where they are under the key `pic`.

    Raises:
        ConfigError: naming the value, what is allowed and what to do.
    """
    if not isinstance(custom_params, Mapping) or custom_params.get("pic") is None:
        return RequestOptions()
    options = custom_params["pic"]
    if not isinstance(options, Mapping):
        raise ConfigError(f'custom_params.pic={options!r}: must be an object such as {{"mode": "auto"}}.')
    unknown = sorted(str(key) for key in options if key not in ("mode", *SETTINGS))
    if unknown:
        allowed = ", ".join(map(repr, ("mode", *SETTINGS)))
        raise ConfigError(f"custom_params.pic has the unknown key {unknown[0]!r}: allowed are {allowed}.")
    mode = options.get("mode", Mode.AUTO.value)
    if mode not in [m.value for m in Mode]:
        raise ConfigError(f"custom_params.pic.mode={mode!r}: must be one of {_MODES}; 'auto' is the default.")
    overrides = {name: options[name] for name in SETTINGS if options.get(name) is not None}
    for name, value in overrides.items():
        setting = SETTINGS[name]
        if not setting.allows(value):
            raise ConfigError(
                f"custom_params.pic.{name}={value!r}: must be {setting.allowed}; leave it out for the server's setting."
            )
    return RequestOptions(mode=Mode(mode), overrides=overrides)
