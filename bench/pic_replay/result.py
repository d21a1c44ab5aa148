"""From a streamed reply to a record: clocks relative to the run, token sources, logprobs."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from pic_traces.session import JsonValue, as_type

from pic_replay.client import StreamReply
from pic_replay.records import RequestRecord, Status


class Asked(NamedTuple):
    """The fields of a record that are known before the request is sent."""

    session_id: str
    call: int
    agent: str | None
    warmup: bool
    prompt_key: str
    num_messages: int
    scheduled_at: float


class TokenSources(NamedTuple):
    """Where the prompt's tokens came from, as `RequestRecord` has it; None where the server did not say."""

    prompt_tokens: int | None
    cached_tokens: int | None
    prefix_hit_tokens: int | None
    chunk_hit_tokens: int | None
    computed_tokens: int | None
    cached_tokens_details: dict[str, int | str | None] | None


def token_sources(reply: StreamReply, *, is_sglang: bool) -> TokenSources:
    """Read the usage report.

    `cached_tokens` counts prefix and chunk hits together, and is what `device`, `host` and `storage` of the details add
    up to; `pic` is the chunk hits among them. SGLang was asked for details, and leaves them out where nothing was
    cached: there, no report means 0.
    """
    usage = reply.usage or {}
    prompt = as_type(usage.get("prompt_tokens"), int)
    usage_details = usage.get("prompt_tokens_details")
    usage_details = usage_details if isinstance(usage_details, dict) else {}
    details = reply.extension.get("cached_tokens_details", usage_details.get("cached_tokens_details"))
    details = details if isinstance(details, dict) else {}
    cached = as_type(usage_details.get("cached_tokens"), int)
    if cached is None and is_sglang and prompt is not None:
        cached = sum(as_type(details.get(source), int) or 0 for source in ("device", "host", "storage"))
    if prompt is None or cached is None:
        return TokenSources(prompt, cached, None, None, None, _plain(details))
    chunk_hit = as_type(details.get("pic"), int) or as_type(usage_details.get("pic"), int) or 0
    return TokenSources(prompt, cached, cached - chunk_hit, chunk_hit, prompt - cached, _plain(details))


def build_record(
    asked: Asked,
    reply: StreamReply,
    status: Status,
    *,
    clock_zero: float,
    finished_at: float,
    is_sglang: bool,
    reason: str | None = None,
    num_tokens: int | None = None,
) -> RequestRecord:
    """The record of a request, however far it came; `num_tokens` is the prompt's length where usage has none."""
    sources = token_sources(reply, is_sglang=is_sglang)
    if sources.prompt_tokens is None:
        sources = sources._replace(prompt_tokens=num_tokens)
    sent, first, last = reply.sent_at, reply.first_token_at, reply.last_token_at
    logprobs = (as_type(entry.get("logprob"), float) for entry in reply.logprobs)
    output_ids = as_type(reply.extension.get("output_ids"), list[list[int]])
    return RequestRecord(
        **asked._replace(scheduled_at=asked.scheduled_at - clock_zero)._asdict(),
        **sources._asdict(),
        status=status,
        reason=reason,
        error=None if reason else reply.error,
        http_status=reply.status,
        request_id=reply.request_id,
        sent_at=None if sent is None else sent - clock_zero,
        first_token_at=None if first is None else first - clock_zero,
        last_token_at=None if last is None else last - clock_zero,
        finished_at=finished_at - clock_zero,
        schedule_delay_s=None if sent is None else sent - asked.scheduled_at,
        ttft_s=None if sent is None or first is None else first - sent,
        e2e_s=None if sent is None or status is not Status.OK else finished_at - sent,
        output_tokens=as_type((reply.usage or {}).get("completion_tokens"), int),
        output_text="".join(reply.text),
        output_token_ids=output_ids[0] if output_ids else None,
        first_top_logprobs=_top_logprobs(reply.logprobs[0]) if reply.logprobs else None,
        output_logprobs=[value for value in logprobs if value is not None] or None,
        finish_reason=reply.finish_reason,
    )


class _Top(msgspec.Struct):
    token: str
    logprob: float


def _top_logprobs(entry: dict[str, JsonValue]) -> list[tuple[str, float]] | None:
    top = as_type(entry.get("top_logprobs"), list[_Top])
    return None if top is None else [(item.token, item.logprob) for item in top]


def _plain(details: dict[str, JsonValue]) -> dict[str, int | str | None] | None:
    kept = {key: value for key, value in details.items() if value is None or isinstance(value, int | str)}
    return kept or None
