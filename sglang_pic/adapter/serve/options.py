"""What one request asks of the cache: `custom_params: {"pic": {"mode": "auto" | "off", "seam_tokens": k,
"tail_tokens": n}}`.

Owns the parsing and its messages. The front end parses to answer HTTP 400; the scheduler parses again, because a
request can reach it another way. It must not know the scheduler's types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

import msgspec

from sglang_pic.core import ReusePolicy
from sglang_pic.core.settings import settings_of
from sglang_pic.errors import ConfigError

__all__ = [
    "KEY_MARK",
    "MAX_TOKENS",
    "STRICT_MARK",
    "Mode",
    "RequestOptions",
    "TestingOptions",
    "parse_options",
    "renewed_key",
    "strict_key",
]

# A strict request lives in a namespace of its own, so that rows which came from a splice never reach it. The unit
# separator keeps the mark apart from anything a client would write; the front end refuses keys that hold it.
KEY_MARK = "\x1fpic:"
STRICT_MARK = KEY_MARK + "off"
MAX_TOKENS = 4096


class Mode(Enum):
    """How a request may be served."""

    AUTO = "auto"
    OFF = "off"


class TestingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only a server with the test switch `request_options` takes: experiments on single requests."""

    __test__ = False  # the name begins like a test class; pytest must not collect it

    donors_from: str | None = None
    """The `extra_key` whose donors serve this request; its own rows stay in its own namespace, so that requests of an
    experiment neither see nor feed each other."""
    rotate: bool = True
    """False copies keys as they are: the naive control."""
    flip_donors: bool = False
    """Turn the signs of every spliced row: a corruption for the audit to find. (Rows in another order would be none: a
    key carries its position with it.)"""
    policy: dict[str, int] = {}
    """Settings of the reuse policy for this request alone, any of them and within the bounds of the configuration."""
    record: str | None = None
    """Name of the file in `record_dir` that gets what this request computed."""
    record_keys: bool = False
    """Record the request's keys too, all layers."""

    def __post_init__(self) -> None:
        if self.record is not None and not _RECORD_NAME.fullmatch(self.record):
            raise ValueError(f"record={self.record!r}: must be 1 to 128 letters, digits, '.', '_' or '-'.")
        msgspec.convert(self.policy, ReusePolicy)


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed options."""

    mode: Mode = Mode.AUTO
    overrides: dict[str, int] = {}
    """Settings of the reuse policy that this request sets; the server's hold for the others."""
    testing: TestingOptions = TestingOptions()

    def policy(self, server: ReusePolicy) -> ReusePolicy:
        """The reuse policy of this request on a server with the policy `server`."""
        return msgspec.structs.replace(server, **self.overrides) if self.overrides else server


_RECORD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_MODES = ", ".join(repr(mode.value) for mode in Mode)
_NUMBERS = {
    name: setting._replace(range=setting.range._replace(high=MAX_TOKENS))
    for name in ("seam_tokens", "tail_tokens")
    if (setting := settings_of(ReusePolicy)[name]).range is not None
}


def parse_options(custom_params: object, *, allow_testing: bool = False) -> RequestOptions:
    """Parse the options out of a request's `custom_params`.

    Args:
        custom_params: as the request brought it; options are under the key `pic`.
        allow_testing: whether the key `testing` is taken; only a server under test does.

    Raises:
        ConfigError: naming the value, what is allowed and what to do.
    """
    if not isinstance(custom_params, Mapping) or custom_params.get("pic") is None:
        return RequestOptions()
    options = custom_params["pic"]
    if not isinstance(options, Mapping):
        raise ConfigError(f'custom_params.pic={options!r}: must be an object such as {{"mode": "auto"}}.')
    unknown = sorted(str(key) for key in options if key not in ("mode", *_NUMBERS, "testing"))
    if unknown:
        raise ConfigError(
            f"custom_params.pic has the unknown key {unknown[0]!r}: allowed are 'mode', "
            "'seam_tokens' and 'tail_tokens'."
        )
    testing = TestingOptions()
    if "testing" in options:
        if not allow_testing:
            raise ConfigError(
                "custom_params.pic.testing is allowed on a server under test only, one whose configuration has "
                '{"testing": {"request_options": true}}: leave it out.'
            )
        try:
            testing = msgspec.convert(options["testing"], TestingOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"custom_params.pic.testing: {error}") from error
    mode = options.get("mode", Mode.AUTO.value)
    if mode not in [m.value for m in Mode]:
        raise ConfigError(f"custom_params.pic.mode={mode!r}: must be one of {_MODES}; 'auto' is the default.")
    overrides = {name: options[name] for name in _NUMBERS if options.get(name) is not None}
    for name, value in overrides.items():
        setting = _NUMBERS[name]
        if not setting.allows(value):
            raise ConfigError(
                f"custom_params.pic.{name}={value!r}: must be {setting.allowed}; leave it out for the server's setting."
            )
    return RequestOptions(mode=Mode(mode), overrides={**testing.policy, **overrides}, testing=testing)


def strict_key(extra_key: str | None) -> str:
    """The namespace key of a request that opted out, derived from the key it came with."""
    return (extra_key or "") + STRICT_MARK


def renewed_key(extra_key: str | None, generation: int) -> str | None:
    """The namespace key of an ordinary request, in a namespace that was switched on again `generation` times."""
    return extra_key if generation == 0 else f"{extra_key or ''}{KEY_MARK}{generation}"
