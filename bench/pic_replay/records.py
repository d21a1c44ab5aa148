"""The results of a replay: one record a request (`requests.jsonl`), and their summary (`summary.json`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path

import msgspec
from pic_traces.errors import ReplayError

from pic_replay.packed import read_written


class Status(Enum):
    """How a request ended; a skipped one was too long for the model, an interrupted one was cut off by the user."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of the replay.

    Clocks (`*_at`) are seconds since the replay's clock started (warm-up requests have negative ones). A call is
    scheduled the moment its turn comes: when its user took the session, or when the session's previous call ended.
    `ttft_s` and `e2e_s` count from `sent_at`; `schedule_delay_s` is `sent_at - scheduled_at`. Token counts are the
    server's; None means that it did not say.

    Args:
        call: index of the call in its session.
        prompt_key: hash of the messages and tools: equal in two arms that were sent the same prompt.
        reason: why a request was skipped.
        cached_tokens: prefix and chunk hits together; `cached_tokens_details` is the server's own split.
        computed_tokens: prompt tokens that are neither a prefix hit nor a chunk hit.
        output_token_ids: None where the server does not return them.
        first_top_logprobs: the first output token's most likely tokens (text, log probability), if asked for.
        output_logprobs: log probability of each output token, if asked for.
    """

    schema_version: int = 1
    session_id: str
    call: int
    agent: str | None = None
    warmup: bool = False
    status: Status
    reason: str | None = None
    error: str | None = None
    http_status: int | None = None
    request_id: str | None = None
    prompt_key: str
    num_messages: int
    scheduled_at: float
    sent_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float
    schedule_delay_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cached_tokens_details: dict[str, int | str | None] | None = None
    prefix_hit_tokens: int | None = None
    chunk_hit_tokens: int | None = None
    computed_tokens: int | None = None
    output_tokens: int | None = None
    output_text: str = ""
    output_token_ids: list[int] | None = None
    first_top_logprobs: list[tuple[str, float]] | None = None
    output_logprobs: list[float] | None = None
    finish_reason: str | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution in seconds, from raw records; all None where there is no request to measure."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Latency:
        """Mean and percentiles (linear interpolation between the two nearest values)."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        percentiles = {f"p{percent}": _percentile(ordered, percent / 100) for percent in (50, 90, 95, 99)}
        return cls(mean=math.fsum(ordered) / len(ordered), **percentiles)


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replay in figures. Token sums and latencies are over the completed requests; warm-up is only counted.

    Args:
        planned: calls of the trace after the limits; `requests` of them were begun.
        requests: `completed + failed + skipped + interrupted`.
        prefix_hit_tokens, chunk_hit_tokens, computed_tokens: None where the server reports no cache hits.
        wall_s: from the start of the clock to the end of the last request.
        ttft_scheduled_s: time to first token counted from the scheduled time.
        schedule_delay_s: how late requests were sent.
        achieved_requests_per_s, achieved_prompt_tokens_per_s: completed, per `wall_s`.
        stopped: why the replay ended before its last call; None if it did not.
        tools_flattened: whether tools were sent as plain text.
    """

    schema_version: int = 1
    trace: str
    model: str
    planned: int
    requests: int
    completed: int
    failed: int
    skipped: int
    interrupted: int
    warmup_requests: int
    prompt_tokens: int
    prefix_hit_tokens: int | None
    chunk_hit_tokens: int | None
    computed_tokens: int | None
    output_tokens: int
    wall_s: float
    ttft_s: Latency
    e2e_s: Latency
    ttft_scheduled_s: Latency
    schedule_delay_s: Latency
    achieved_requests_per_s: float
    achieved_prompt_tokens_per_s: float
    stopped: str | None = None
    tools_flattened: bool = False


def summarize(
    records: Sequence[RequestRecord],
    *,
    trace: str,
    model: str,
    planned: int,
    stopped: str | None = None,
    tools_flattened: bool = False,
) -> ReplaySummary:
    """The summary of a replay's records. O(n log n)."""
    measured = [record for record in records if not record.warmup]
    done = [record for record in measured if record.status is Status.OK]
    counts = {status: sum(record.status is status for record in measured) for status in Status}
    wall_s = max((record.finished_at for record in measured), default=0.0)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in done)
    return ReplaySummary(
        trace=trace,
        model=model,
        planned=planned,
        requests=len(measured),
        completed=len(done),
        failed=counts[Status.FAILED],
        skipped=counts[Status.SKIPPED],
        interrupted=counts[Status.INTERRUPTED],
        warmup_requests=len(records) - len(measured),
        prompt_tokens=prompt_tokens,
        prefix_hit_tokens=_total([record.prefix_hit_tokens for record in done]),
        chunk_hit_tokens=_total([record.chunk_hit_tokens for record in done]),
        computed_tokens=_total([record.computed_tokens for record in done]),
        output_tokens=sum(record.output_tokens or 0 for record in done),
        wall_s=wall_s,
        ttft_s=Latency.of(record.ttft_s for record in done if record.ttft_s is not None),
        e2e_s=Latency.of(record.e2e_s for record in done if record.e2e_s is not None),
        ttft_scheduled_s=Latency.of(
            record.first_token_at - record.scheduled_at for record in done if record.first_token_at is not None
        ),
        schedule_delay_s=Latency.of(r.schedule_delay_s for r in measured if r.schedule_delay_s is not None),
        achieved_requests_per_s=len(done) / wall_s if wall_s else 0.0,
        achieved_prompt_tokens_per_s=prompt_tokens / wall_s if wall_s else 0.0,
        stopped=stopped,
        tools_flattened=tools_flattened,
    )


def load_records(folder: Path) -> list[RequestRecord]:
    """The records of a run folder, packed by gzip or not, in the order in which the requests ended; warm-up included.

    Raises:
        ReplayError: the file is missing or a line is not a record; names file and line.
    """
    path = folder / "requests.jsonl"
    try:
        lines = read_written(path).splitlines()
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error}") from error
    records: list[RequestRecord] = []
    for line in lines:
        try:
            records.append(msgspec.json.decode(line, type=RequestRecord))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ReplayError(f"{path}:{len(records) + 1}: not a record of a replay: {error}") from error
    return records


def load_summary(folder: Path) -> ReplaySummary:
    """The summary of a run folder.

    Raises:
        ReplayError: the file is missing or not a replay's summary.
    """
    path = folder / "summary.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplaySummary)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplayError(f"{path}: no summary of a replay: {error}") from error


def _percentile(ordered: list[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _total(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
