"""The hooks on SGLang's HTTP front end: HTTP 400 for bad options, chunk hits in OpenAI responses.

They are installed in every process before the server's arguments are parsed. Each one first asks whether this server
runs the backend `pic`; a stock server pays one comparison per request.
"""

from __future__ import annotations

from typing import Any

from sglang_pic.adapter.hooks import hook
from sglang_pic.adapter.namespace import KEY_MARK
from sglang_pic.adapter.serve.options import parse_options
from sglang_pic.errors import ConfigError

BACKEND_NAME = "pic"
"""What `--radix-cache-backend` takes."""


def install() -> None:
    """Register the hooks; SGLang applies them after all plugins have run."""
    hook("before", "managers.tokenizer_manager.TokenizerManager._validate_one_request", _validate)
    hook("after", "entrypoints.openai.utils.cached_tokens_details_from_dict", _with_chunk_hits)


def _validate(manager: Any, obj: Any, *args: object, **kwargs: object) -> None:
    if manager.server_args.radix_cache_backend != BACKEND_NAME:
        return
    sampling_params = getattr(obj, "sampling_params", None) or {}
    parse_options(sampling_params.get("custom_params"))
    extra_key = getattr(obj, "extra_key", None)
    if isinstance(extra_key, str) and KEY_MARK in extra_key:
        raise ConfigError(
            f"extra_key={extra_key!r}: must not contain {KEY_MARK!r}, which marks the plugin's own namespaces; leave "
            "the mark out."
        )


def _with_chunk_hits(result: Any, details: dict[str, Any], *args: object, **kwargs: object) -> Any:
    ours = {name: count for name, count in details.items() if name.startswith("pic")}
    if not ours:
        return None
    _allow_extra_fields(type(result))
    return type(result)(**{**result.model_dump(), **ours})


def _allow_extra_fields(model: type) -> None:
    """Let the response model carry one more field; its parents are rebuilt once, as pydantic inlines their schemas."""
    from pydantic import BaseModel
    from sglang.srt.entrypoints.openai import protocol

    if model.model_config.get("extra") == "allow":  # type: ignore[attr-defined]
        return
    model.model_config["extra"] = "allow"  # type: ignore[attr-defined]
    model.model_rebuild(force=True)  # type: ignore[attr-defined]
    for parent in vars(protocol).values():
        if isinstance(parent, type) and issubclass(parent, BaseModel) and parent.__module__ == protocol.__name__:
            parent.model_rebuild(force=True)
