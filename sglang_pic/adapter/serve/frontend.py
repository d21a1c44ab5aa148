"""The hooks on SGLang's front end: options in headers, HTTP 400 for bad requests, spliced tokens in responses.

They are installed in every process before the server's arguments are parsed, and do nothing unless the server runs the
backend `pic`. The HTTP server's hooks are installed in processes that have one: when they make their tokenizer manager,
and in `http_worker`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sglang_pic.adapter.namespace import KEY_MARK
from sglang_pic.adapter.serve import headers, strip
from sglang_pic.adapter.serve.options import parse_options, shown
from sglang_pic.adapter.server_info import SWITCHES
from sglang_pic.adapter.sglang.hooks import apply_hooks, hook
from sglang_pic.errors import ConfigError, did_you_mean

BACKEND_NAME = "pic"
"""The value of `--radix-cache-backend`."""
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
WORKER_APP = "sglang_pic.adapter.serve.http_worker:app"
_APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"


def install() -> None:
    """Register the hooks; SGLang applies them after all plugins have run."""
    hook(__name__, "TokenizerManager.__init__", _with_http_server)
    hook(__name__, "TokenizerManager.generate_request", _take_headers)
    hook(__name__, "TokenizerManager._validate_one_request", _validate)
    hook(__name__, "TokenizerManager._wait_one_response", _with_noted_hits)
    hook(__name__, "TokenizerControlMixin.set_internal_state", _with_reasons)
    hook(__name__, "MultiTokenizerRouter.__init__", _with_http_workers)
    hook(__name__, "TokenizerManager.convert_to_span_attrs", _with_span_attributes)
    hook(__name__, "cached_tokens_details_from_dict", _with_chunk_hits)


def install_http() -> None:
    """Have the HTTP server of this process check headers and bodies; it must not have started.

    Raises:
        ContractError: SGLang's HTTP server differs from the one that this version was built for.
    """
    from sglang.srt.entrypoints import http_server

    from sglang_pic.adapter.sglang.contract import HTTP, check_contract

    check_contract(HTTP)
    strip.install()
    apply_hooks()
    http_server.app.add_middleware(Refusals)
    _allow_extra_fields()


@dataclass(slots=True)
class _Judged:
    """What the hooks found out about a request that an HTTP server is answering."""

    is_admitted: bool = False
    """Whether a prompt of the request has passed the checks."""
    refusal: ConfigError | None = None
    hits: Counter[str] = field(default_factory=Counter)
    """Our entries of `cached_tokens_details`, over the prompts that have begun to be answered."""
    reasons: set[str] = field(default_factory=set)

    def note(self, details: Mapping[str, Any]) -> None:
        """Add the details of one prompt."""
        for name, value in _ours(details).items():
            if isinstance(value, int):
                self.hits[name] += value
            else:
                self.reasons.add(str(value))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the response, as ASGI has them; none if no prompt has begun to be answered."""
        found = {f"x-pic-{name.removeprefix('pic_')}": str(number) for name, number in self.hits.items()}
        if "x-pic-pic" in found:
            found["x-pic-spliced"] = found.pop("x-pic-pic")
        if self.reasons:
            found["x-pic-reason"] = ", ".join(sorted(self.reasons))
        return [(name.replace("_", "-").encode(), value.encode()) for name, value in sorted(found.items())]


class _Outputs:
    """A prompt's outputs, whose first one is noted; the others pass without another step."""

    def __init__(self, outputs: Any, judged: _Judged) -> None:
        self._outputs, self._judged = outputs, judged
        self._is_noted = False

    def __aiter__(self) -> _Outputs:
        return self

    def aclose(self) -> Any:
        return self._outputs.aclose()

    def __anext__(self) -> Any:
        return self._outputs.__anext__() if self._is_noted else self._first()

    async def _first(self) -> Any:
        output = await self._outputs.__anext__()
        self._is_noted = True
        self._judged.note({"pic": 0, **(output.get("meta_info", {}).get("cached_tokens_details") or {})})
        return output


_JUDGED: ContextVar[_Judged | None] = ContextVar("judged", default=None)
"""The request that this task answers; `None` outside an HTTP server."""


class Refusals:
    """The ASGI middleware that answers HTTP 400 to requests that the plugin refuses.

    SGLang answers 200 to some streams before it has checked them, and sends a refusal as an event. So what it sends
    before a prompt has passed the checks is kept back until then, or until the answer is complete.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer HTTP 400, or call the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from starlette.datastructures import Headers

        try:
            headers.read(Headers(scope=scope))
        except ConfigError as error:
            await _refusal(error)(scope, receive, send)
            return
        judged, kept, has_begun, is_refused = _Judged(), [], False, False
        _JUDGED.set(judged)

        async def send_judged(message: Any) -> None:
            nonlocal has_begun, is_refused
            if is_refused:
                return
            kept.append(message)
            # An answer that has begun, or that SGLang refuses itself, stays as it is.
            if judged.refusal is not None and kept[0].get("status") == 200:
                is_refused = True
                await _refusal(judged.refusal)(scope, receive, send)
            elif judged.is_admitted or not message.get("more_body", message is kept[0]):
                if not has_begun and judged.hits:
                    kept[0] = {**kept[0], "headers": [*kept[0].get("headers", ()), *judged.headers()]}
                has_begun = True
                for each in kept:
                    await send(each)
                kept.clear()

        try:
            await self._app(scope, receive, send_judged)
        except ConfigError as error:
            # SGLang makes no answer of what `/set_internal_state` raises.
            if error is not judged.refusal or has_begun:
                raise
            await _refusal(error)(scope, receive, send)


def _refusal(error: ConfigError) -> Any:
    from starlette.responses import JSONResponse

    message = {"message": str(error), "type": "invalid_request_error", "code": 400}
    return JSONResponse({"error": message}, status_code=400)


@contextmanager
def _judging() -> Iterator[None]:
    """Let `Refusals` know of a refusal."""
    try:
        yield
    except ConfigError as error:
        if (judged := _JUDGED.get()) is not None:
            judged.refusal = error
        raise


def _with_http_server(_: None, _manager: object, server_args: Any, *args: object, **kwargs: object) -> None:
    http_server = sys.modules.get(HTTP_SERVER)
    # If the application has started, `http_worker` has done it.
    if http_server is not None and http_server.app.middleware_stack is None and _is_ours(server_args):
        install_http()


def _with_http_workers(_: None, _manager: object, server_args: Any, *args: object, **kwargs: object) -> None:
    # SGLang loads no plugins in these processes.
    if _is_ours(server_args):
        os.environ[_APP_VARIABLE] = WORKER_APP


def _is_ours(server_args: Any) -> bool:
    return bool(server_args.radix_cache_backend == BACKEND_NAME)


def _take_headers(manager: Any, obj: Any, request: Any = None) -> None:
    found: Any = getattr(request, "headers", None)
    if hasattr(found, "getlist") and hasattr(obj, "cache_salt") and _is_ours(manager.server_args):
        with _judging():
            _refuse_empty(obj, obj.input_ids)
            headers.put(headers.read(found), obj)
            strip.strip_text(manager, obj)


def _validate(manager: Any, obj: Any, input_ids: Sequence[int] | None = None) -> None:
    if not _is_ours(manager.server_args):
        return
    with _judging():
        _refuse_empty(obj, input_ids)
        _check(*(getattr(obj, name, None) for name in ("sampling_params", "extra_key")))
    if (judged := _JUDGED.get()) is not None:
        judged.is_admitted = True


def _with_noted_hits(outputs: Any, manager: Any, _obj: object, _request: object = None) -> _Outputs | None:
    """The outputs of a prompt, noted for the headers of the response where an HTTP server answers."""
    judged = _JUDGED.get()
    return _Outputs(outputs, judged) if judged is not None and _is_ours(manager.server_args) else None


async def _answered(updated: Awaitable[list[bool]], asked: Mapping[str, object]) -> list[bool]:
    answers = await updated
    # Of several schedulers one may have what the others lack, such as a suspended namespace.
    if not any(answers):
        words = ", ".join(f"{key}={shown(value)}" for key, value in asked.items())
        hint = "".join(did_you_mean(key, SWITCHES) for key in asked if key not in SWITCHES)
        allowed = "; ".join(f"{key}: {values}" for key, values in SWITCHES.items())
        with _judging():
            raise ConfigError(f"server_args {words}: refused, nothing was changed; allowed are {allowed}{hint}")
    return answers


def _with_reasons(updated: Awaitable[list[bool]], manager: Any, obj: Any) -> Awaitable[list[bool]] | None:
    """Answer HTTP 400 to switches of the plugin that a scheduler refuses, where SGLang says `[false]`."""
    is_ours = any(key.startswith("pic") for key in obj.server_args) and _is_ours(manager.server_args)
    return _answered(updated, obj.server_args) if is_ours else None


def _refuse_empty(obj: Any, input_ids: Sequence[object] | None) -> None:
    """Raise a `ConfigError` for a prompt without tokens, at which SGLang 0.5.23 ends with an error.

    Those of media and of a session are added later.
    """
    has_others = any(getattr(obj, name, None) is not None for name in ("input_embeds", "session_params"))
    if input_ids is not None and len(input_ids) == 0 and not has_others and not obj.contains_mm_input():
        raise ConfigError("the prompt has no tokens; send a text or token ids.")


def _check(sampling_params: Any, extra_key: object) -> None:
    """Check the options and the key of one prompt.

    Raises:
        ConfigError: it names the bad value.
    """
    if sampling_params and not isinstance(sampling_params, Mapping):
        raise ConfigError(f"sampling_params={shown(sampling_params)}: must be an object for one prompt.")
    parse_options((sampling_params or {}).get("custom_params"))
    if isinstance(extra_key, str) and KEY_MARK in extra_key:
        raise ConfigError(
            f"extra_key={shown(extra_key)}: must not contain {KEY_MARK!r}, which is reserved for the plugin's own "
            "namespaces; choose a key without it."
        )


def _with_chunk_hits(result: Any, details: dict[str, Any], *args: object, **kwargs: object) -> Any:
    ours = _ours(details)
    return type(result)(**{**result.model_dump(), **ours}) if ours else None


def _with_span_attributes(
    attributes: dict[str, Any], _manager: object, _state: object, received: Any, index: int
) -> dict[str, Any] | None:
    """Give a request's OpenTelemetry span what its response has; SGLang asks for it with `--enable-trace` only."""
    details = received.cached_tokens_details[index] if received.cached_tokens_details else None
    return {**attributes, **{f"sglang.{name}": value for name, value in _ours(details).items()}} if details else None


def _ours(details: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in details.items() if name.startswith("pic")}


def _allow_extra_fields() -> None:
    """Allow our fields in the response model; its parents are rebuilt, because pydantic inlines schemas."""
    from pydantic import BaseModel
    from sglang.srt.entrypoints.openai import protocol

    protocol.CachedTokensDetails.model_config["extra"] = "allow"
    protocol.CachedTokensDetails.model_rebuild(force=True)
    for parent in vars(protocol).values():
        if isinstance(parent, type) and issubclass(parent, BaseModel) and parent.__module__ == protocol.__name__:
            parent.model_rebuild(force=True)
