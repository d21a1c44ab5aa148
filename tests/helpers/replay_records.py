"""Records of requests that were never sent, for tests of what is made of records."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
from pic_replay.records import RequestRecord


def record(call: int, **fields: object) -> RequestRecord:
    """A record of session `s`; what the test does not name is plausible."""
    asked = {"session_id": "s", "call": call, "status": "ok", "prompt_key": f"key-{call}", "num_messages": 2}
    times = {"scheduled_at": 0.0, "finished_at": 1.0, "schedule_delay_s": 0.001, "ttft_s": 1.0, "e2e_s": 2.0}
    tokens = {"prompt_tokens": 1000, "prefix_hit_tokens": 100, "chunk_hit_tokens": 0, "computed_tokens": 900}
    logprobs = [["a", math.log(0.9)], ["b", math.log(0.1)]]
    answer = {"output_tokens": 4, "output_text": "same", "first_top_logprobs": logprobs}
    return msgspec.convert({**asked, **times, **tokens, **answer, **fields}, RequestRecord)


def write_records(folder: Path, records: Iterable[RequestRecord]) -> None:
    """`requests.jsonl` of a replay."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requests.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))
