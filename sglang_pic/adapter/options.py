"""What one request asks of the cache: `custom_params: {"pic": {"mode": "auto" | "off", "seam_tokens": k}}`.

Owns the parsing and its messages. The front end parses to answer HTTP 400; the scheduler parses again, because a
request can reach it another way. It must not know the scheduler's types.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from sglang_pic.errors import ConfigError

__all__ = ["MAX_SEAM_TOKENS", "STRICT_MARK", "Mode", "RequestOptions", "parse_options", "strict_key"]

# A strict request lives in a namespace of its own, so that rows which came from a splice never reach it. The unit
# separator keeps the mark apart from anything a client would write; the front end refuses keys that hold it.
STRICT_MARK = "\x1fpic:off"
MAX_SEAM_TOKENS = 4096


class Mode(Enum):
    """How a request may be served."""

    AUTO = "auto"
    OFF = "off"


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed options; `seam_tokens` is `None` where the server's setting applies."""

    mode: Mode = Mode.AUTO
    seam_tokens: int | None = None


_MODES = ", ".join(repr(mode.value) for mode in Mode)


def parse_options(custom_params: object) -> RequestOptions:
    """Parse the options out of a request's `custom_params`.

    Raises:
        ConfigError: naming the value, what is allowed and what to do.
    """
    if not isinstance(custom_params, Mapping) or custom_params.get("pic") is None:
        return RequestOptions()
    options = custom_params["pic"]
    if not isinstance(options, Mapping):
        raise ConfigError(f'custom_params.pic={options!r}: must be an object such as {{"mode": "auto"}}.')
    unknown = sorted(str(key) for key in options if key not in ("mode", "seam_tokens"))
    if unknown:
        raise ConfigError(
            f"custom_params.pic has the unknown key {unknown[0]!r}: allowed are 'mode' and 'seam_tokens'."
        )
    mode = options.get("mode", Mode.AUTO.value)
    if mode not in [m.value for m in Mode]:
        raise ConfigError(f"custom_params.pic.mode={mode!r}: must be one of {_MODES}; 'auto' is the default.")
    seam_tokens = options.get("seam_tokens")
    if seam_tokens is not None and (
        isinstance(seam_tokens, bool) or not isinstance(seam_tokens, int) or not 0 <= seam_tokens <= MAX_SEAM_TOKENS
    ):
        raise ConfigError(
            f"custom_params.pic.seam_tokens={seam_tokens!r}: must be a whole number from 0 to {MAX_SEAM_TOKENS}; "
            "leave it out for the server's setting."
        )
    return RequestOptions(mode=Mode(mode), seam_tokens=seam_tokens)


def strict_key(extra_key: str | None) -> str:
    """The namespace key of a request that opted out, derived from the key it came with."""
    return (extra_key or "") + STRICT_MARK
