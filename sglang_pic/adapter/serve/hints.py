"""KV hints: the actions of SGLang's `kv_hints` envelope that this package serves, as options of the request.

SGLang has the envelope since 0.5.21, in `/generate` and in `Engine`, and leaves its actions to whoever implements them:
one that is not known, or has another version, is ignored. The names are those of vLLM's proposal (vllm#51428), but for
`release`.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from sglang_pic.adapter.serve.options import RequestOptions, parse_options
from sglang_pic.errors import ConfigError

VERSION: Final = "1"
"""The `action_version` that is served."""
RETAINED: Final = 50
"""The priority of a `retain` without one: released before pins, which have the highest."""
_PAYLOAD: Final = {"pin": "name", "pin_ttl_s": "ttl_s", "pin_priority": "priority", "unpin": "name"}


_T = TypeVar("_T")


class _Hold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str | None = None
    ttl_s: int | None = None
    priority: int | None = None


class _Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class _Action(msgspec.Struct, frozen=True):
    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, object] = {}


class _Envelope(msgspec.Struct, frozen=True):
    actions: list[_Action] = []


def with_hints(options: RequestOptions, envelope: object) -> RequestOptions:
    """The options with those that a request's `kv_hints` ask for.

    `pin` and `retain` pin the prompt under the payload's `name`, by default the action's id, until `ttl_s` is over;
    `priority` orders them if memory is short. `demote` and `release` end the pin of a name: SGLang then evicts its rows
    like any others, with HiCache to the host.

    Args:
        options: of the request's `custom_params`.
        envelope: SGLang's `KvHintsEnvelope`, the same as JSON, or None.

    Raises:
        ConfigError: a payload is not valid, or an action contradicts another one or the options.
    """
    if envelope is None:
        return options
    asked: dict[str, object] = {}
    for action in _read(envelope, _Envelope, "kv_hints").actions:
        if action.action_version == VERSION and action.action_type in ("pin", "retain", "demote", "release"):
            found = _options_of(action)
            if not asked.keys().isdisjoint(found):
                raise ConfigError(f"kv_hints: {action.action_type!r} is the second action of its kind; send one.")
            asked |= found
    if not asked:
        return options
    if any(getattr(options, key) is not None for key in ("pin", "unpin") if key in asked):
        raise ConfigError("kv_hints: custom_params.pic pins or unpins too; send one of them.")
    try:
        hints = parse_options({"pic": asked})
    except ConfigError as error:
        text = str(error)
        for key, name in _PAYLOAD.items():
            text = text.replace(f"custom_params.pic.{key}=", f"kv_hints payload {name}=")
        raise ConfigError(text) from error
    return msgspec.structs.replace(options, **{key: getattr(hints, key) for key in asked})


def _options_of(action: _Action) -> dict[str, object]:
    if action.action_type in ("demote", "release"):
        return {"unpin": _read(action.payload, _Drop, f"kv_hints payload of {action.action_type!r}").name}
    held = _read(action.payload, _Hold, f"kv_hints payload of {action.action_type!r}")
    priority = RETAINED if held.priority is None and action.action_type == "retain" else held.priority
    found = {"pin": held.name or action.action_id, "pin_ttl_s": held.ttl_s, "pin_priority": priority}
    return {key: value for key, value in found.items() if value is not None}


def _read(value: object, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.convert(value, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}.") from error
