"""From a recorded call to the request body that is sent."""

from __future__ import annotations

import hashlib

import msgspec
from pic_traces.flatten import flatten_tools
from pic_traces.session import Call, JsonValue

from pic_replay.options import ReplayOptions
from pic_replay.server import ServerInfo


def prompt_part(call: Call, *, flatten: bool) -> dict[str, JsonValue]:
    """The fields that shape the prompt: messages with their thoughts, tools and the recorded template options."""
    if flatten:
        kept = {key: value for key, value in call.options.items() if key != "tool_choice"}
        return {"messages": [*flatten_tools(call.messages, call.tools)], **kept}
    return {"messages": [*call.messages], **({"tools": call.tools} if call.tools else {}), **call.options}


def prompt_key(part: dict[str, JsonValue]) -> str:
    """A name for a prompt (32 hex digits): equal for equal prompt parts."""
    return hashlib.blake2b(msgspec.json.encode(part, order="sorted"), digest_size=16).hexdigest()


def build_body(part: dict[str, JsonValue], options: ReplayOptions, info: ServerInfo) -> dict[str, JsonValue]:
    """The whole request body: greedy, streamed, with usage, and with the fields that SGLang has beyond OpenAI's."""
    body: dict[str, JsonValue] = {
        "model": info.model,
        **part,
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if info.is_sglang:
        body["return_cached_tokens_details"] = True
        body["return_output_ids_in_sglext"] = True
    if options.logprobs:
        # NOTE: output logprobs only. Input logprobs (`logprob_start_len`) would switch every reuse off.
        body["logprobs"] = True
        body["top_logprobs"] = options.logprobs
    if options.custom_params:
        body["custom_params"] = dict(options.custom_params)
    for key, value in options.extra_body.items():
        current = body.get(key)
        body[key] = {**current, **value} if isinstance(current, dict) and isinstance(value, dict) else value
    return body
