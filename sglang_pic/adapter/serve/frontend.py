"""The hooks on SGLang's front end: options in headers, HTTP 400 for bad ones, spliced tokens in responses and spans.

They are installed in every process before the server's arguments are parsed, and do nothing unless the server runs the
backend `pic`. The HTTP server's hooks are installed in processes that have one: when they make their tokenizer manager,
and in `http_worker`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sglang_pic.adapter.namespace import KEY_MARK
from sglang_pic.adapter.serve import headers
from sglang_pic.adapter.serve.hints import with_hints
from sglang_pic.adapter.serve.options import parse_options, shown
from sglang_pic.adapter.sglang.hooks import apply_hooks, hook
from sglang_pic.errors import ConfigError

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
    hook(__name__, "serve_generate_request", _serve_generate)
    apply_hooks()
    http_server.app.add_middleware(HeaderCheck)
    _allow_extra_fields()


class HeaderCheck:
    """The ASGI middleware that answers HTTP 400 to invalid headers, before a stream begins."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer HTTP 400, or call the application."""
        answer = self._app
        if scope["type"] == "http":
            from starlette.datastructures import Headers

            try:
                headers.read(Headers(scope=scope))
            except ConfigError as error:
                answer = _refusal(error)
        await answer(scope, receive, send)


def _refusal(error: ConfigError) -> Any:
    from starlette.responses import JSONResponse

    message = {"message": str(error), "type": "invalid_request_error", "code": 400}
    return JSONResponse({"error": message}, status_code=400)


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


async def _serve_generate(original: Callable[..., Awaitable[Any]], obj: Any, request: Any) -> Any:
    """Answer HTTP 400 to streams with bad options too: SGLang checks these after it has answered 200."""
    try:
        if obj.stream:
            headers.put(headers.read(request.headers), obj)
            params, keys, hints = obj.sampling_params, obj.extra_key, obj.kv_hints
            for each in params if isinstance(params, list) else [params]:
                _check(each, None)
            for each in hints if isinstance(hints, list) else [hints]:
                _check(params if isinstance(params, Mapping) else None, None, each)
            for key in keys if isinstance(keys, list) else [keys]:
                _check(None, key)
    except ConfigError as error:
        return _refusal(error)
    return await original(obj, request)


def _take_headers(manager: Any, obj: Any, request: Any = None) -> None:
    found: Any = getattr(request, "headers", None)
    if hasattr(found, "getlist") and hasattr(obj, "cache_salt") and _is_ours(manager.server_args):
        headers.put(headers.read(found), obj)


def _validate(manager: Any, obj: Any, *args: object, **kwargs: object) -> None:
    if _is_ours(manager.server_args):
        _check(*(getattr(obj, name, None) for name in ("sampling_params", "extra_key", "kv_hints")))


def _check(sampling_params: Any, extra_key: object, kv_hints: object = None) -> None:
    """Check the options, the key and the hints of one prompt.

    Raises:
        ConfigError: it names the bad value.
    """
    if sampling_params and not isinstance(sampling_params, Mapping):
        raise ConfigError(f"sampling_params={shown(sampling_params)}: must be an object for one prompt.")
    with_hints(parse_options((sampling_params or {}).get("custom_params")), kv_hints)
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
