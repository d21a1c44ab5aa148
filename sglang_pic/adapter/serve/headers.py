"""Options and the salt of a request in HTTP headers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from sglang_pic.adapter.serve.options import INTEGERS, parse_options, shown
from sglang_pic.errors import ConfigError

OPTIONS: Final = {
    f"x-pic-{name.replace('_', '-')}": name for name in ("mode", "preset", "edit", "pin", *INTEGERS, "unpin")
}
"""Headers, and the options of `custom_params.pic` that they set."""
SALT: Final = "x-pic-salt"
"""The header that sets `cache_salt`."""
THROUGH_GATEWAYS: Final = "x-request-id-pic-"
"""Replaces `x-pic-` in headers through SGLang's gateways, which forward only headers of request ids."""

_PREFIX: Final = "x-pic-"
_VALID_SALT = re.compile(r"[!-~]{1,256}")


class Headers(Protocol):
    """Starlette's headers."""

    def __iter__(self) -> Iterator[str]: ...

    def getlist(self, key: str) -> Sequence[str]: ...


class Asked(NamedTuple):
    """The options and the salt in a request's headers."""

    options: dict[str, str | int]
    salt: str | None = None


def read(headers: Headers) -> Asked:
    """Read and check the headers.

    Raises:
        ConfigError: a header was sent twice, its value is not allowed, or its name begins as ours and is unknown.
    """
    found = {}
    for name in headers:
        _refuse_unknown(name)
    for name in (*OPTIONS, SALT):
        values = [*headers.getlist(name), *headers.getlist(name.replace(_PREFIX, THROUGH_GATEWAYS))]
        # A client and a gateway may both send it.
        if len(values) > 1:
            raise ConfigError(f"header {name}: sent {len(values)} times; send it once.")
        if values:
            found[name] = values[0]
    salt = found.pop(SALT, None)
    if salt is not None and not _VALID_SALT.fullmatch(salt):
        raise ConfigError(
            f"header {SALT}={shown(salt)}: must be 1 to 256 printable ASCII characters without spaces; change it."
        )
    options = {OPTIONS[name]: _value(OPTIONS[name], value) for name, value in found.items()}
    try:
        parse_options({"pic": options})
    except ConfigError as error:
        raise ConfigError(_of_headers(str(error))) from error
    return Asked(options, salt)


def put(asked: Asked, request: Any) -> None:
    """Write options and salt to SGLang's `GenerateReqInput`, as if they had been in its body.

    Raises:
        ConfigError: the body has other values.
    """
    if asked.salt is not None:
        given = request.cache_salt
        if any(salt and salt != asked.salt for salt in (given if isinstance(given, list) else [given])):
            raise ConfigError(f"header {SALT}: the body has another cache_salt; send one of them, or the same.")
        request.cache_salt = asked.salt
    if asked.options:
        params = request.sampling_params
        several = isinstance(params, list)
        merged = [_merged(asked.options, each) for each in (params if several else [params])]
        request.sampling_params = merged if several else merged[0]


def _refuse_unknown(name: str) -> None:
    """Raise a `ConfigError` for a name like ours: with a misspelt salt, tenants would share a namespace."""
    plain = name.replace("_", "-").replace(THROUGH_GATEWAYS, _PREFIX)
    known = [SALT, *OPTIONS]
    if plain.startswith(_PREFIX) and (plain not in known or "_" in name):
        (nearest,) = difflib.get_close_matches(plain[:64], known, n=1, cutoff=0)
        raise ConfigError(f"header {shown(name)}: unknown; {nearest} is the nearest of {', '.join(known)}; correct it.")


def _value(option: str, text: str) -> str | int:
    return int(text) if option in INTEGERS and re.fullmatch("[0-9]{1,9}", text) else text


def _of_headers(text: str) -> str:
    """A message about `custom_params` with the headers' names."""
    for header, option in OPTIONS.items():
        text = text.replace(f"custom_params.pic.{option}=", f"header {header}=")
    return text


def _merged(options: Mapping[str, str | int], params: Any) -> dict[str, Any]:
    params = _object(params, "sampling_params")
    custom = _object(params.get("custom_params"), "custom_params")
    pic = _object(custom.get("pic"), "custom_params.pic")
    for name, value in options.items():
        if pic.get(name) not in (None, value):
            header = f"x-pic-{name.replace('_', '-')}"
            raise ConfigError(
                f"header {header}={shown(value)}: custom_params.pic.{name} is {shown(pic[name])}; send one of them, "
                "or the same."
            )
    return {**params, "custom_params": {**custom, "pic": {**pic, **options}}}


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}={shown(value)}: must be an object; the headers x-pic-* add to it.")
    return value or {}
