"""The demo's recorded calls: the cached tokens of a prompt on each server, and their positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from pic_replay.records import RequestRecord
from pic_traces.encode import EncodedCall, Encoder, load_encoder
from pic_traces.encode.encoded import Tokens
from pic_traces.session import Call
from pic_traces.source import load

from pic_bench.companion.snippets import Row, SnippetPool, quote
from pic_bench.compare.run_folder import load_scenes
from pic_bench.report.study import RESULTS
from sglang_pic.census.outcome import CallRef, Outcome
from sglang_pic.census.simulate import Cache
from sglang_pic.core import CoreConfig

_RECORD = "demo"
_TITLES = {"clock-sample-agents": "behind a clock that changes with every call", "sample-agents": "as recorded"}
_QUOTED_CHARS = 600
_PREFIX, _MOVED, _SEAM, _COMPUTED, _FIELD = "prefix", "moved", "seam", "computed", "field"


class Piece(Row, frozen=True, kw_only=True):
    """Tokens of a prompt from where the last piece ended; `text` and `old` are numbers of texts."""

    end: int
    kind: str
    text: int = 0
    old: int = 0
    """Of a changed field: its value before."""
    shift: int = 0
    donor: int | None = None
    """The number of the call in the scene that computed these rows."""


class CallRow(Row, frozen=True, kw_only=True):
    """A call as two servers recorded it: tokens, and seconds to the first token."""

    session: str
    index: int
    prompt_len: int
    stock_prefix_len: int
    prefix_len: int
    moved_len: int
    stock_ttft_s: float
    ttft_s: float
    pieces: list[Piece]
    """Empty where today's planner would splice other tokens than the recorded server did."""


class Scene(Row, frozen=True, kw_only=True):
    """One way in which the sample's sessions were sent."""

    title: str
    record: str
    calls: list[CallRow]


class _Served(NamedTuple):
    """A call's tokens, its path with the tokens that the recorded server answered."""

    tokens: Tokens
    path: Tokens


def read_scenes(tokenizer: Path, texts: SnippetPool) -> list[Scene]:
    """Both scenes of the demo.

    Raises:
        BenchError: the record cannot be read.
        TraceError: there is no tokenizer in the folder.
    """
    encoder = load_encoder(str(tokenizer))
    scenes = []
    for name, run in load_scenes(RESULTS / _RECORD).items():
        stock, patched = (
            {(record.session_id, record.call): record for record in run.records[arm] if not record.warmup}
            for arm in ("stock", "pic")
        )
        calls = [call for session in load(run.config.trace) for call in session.calls()]
        keys = [(call.session_id, call.index) for call in calls]
        outcomes = _serve(calls, encoder, [patched[key] for key in keys])
        rows = [
            _row(stock[key], patched[key], outcome, encoded, encoder, texts)
            for key, (outcome, encoded) in zip(keys, outcomes, strict=True)
        ]
        scenes.append(Scene(title=_TITLES[name], record=f"{_RECORD}/{name}", calls=rows))
    return scenes


def _serve(calls: list[Call], encoder: Encoder, records: list[RequestRecord]) -> Iterator[tuple[Outcome, EncodedCall]]:
    """Plan every call again, behind the answers that the recorded server gave."""
    cache = Cache(CoreConfig(), encoder)
    for number, (call, record) in enumerate(zip(calls, records, strict=True)):
        encoded = encoder.encode(call)
        ref = CallRef(number, "", call.session_id, call.index)
        if number == 0:
            # The warm-up's text is in no record, but for what it had in common with the first prompt.
            warm = encoded.tokens[: record.prefix_hit_tokens]
            cache.serve(ref, None, cast("EncodedCall", _Served(warm, warm)))
        answer = np.asarray(record.output_token_ids or [], np.int32)
        served = _Served(encoded.tokens, np.concatenate([encoded.tokens, answer]))
        yield cache.serve(ref, None, cast("EncodedCall", served)), encoded


def _row(
    stock: RequestRecord,
    patched: RequestRecord,
    outcome: Outcome,
    encoded: EncodedCall,
    encoder: Encoder,
    texts: SnippetPool,
) -> CallRow:
    recorded = (patched.prompt_tokens, patched.prefix_hit_tokens, patched.chunk_hit_tokens)
    is_same = recorded == (len(encoded.tokens), outcome.prefix_len, outcome.num_chunk_hit)
    return CallRow(
        session=patched.session_id,
        index=patched.call,
        prompt_len=patched.prompt_tokens or 0,
        stock_prefix_len=stock.prefix_hit_tokens or 0,
        prefix_len=patched.prefix_hit_tokens or 0,
        moved_len=patched.chunk_hit_tokens or 0,
        stock_ttft_s=stock.ttft_s or 0.0,
        ttft_s=patched.ttft_s or 0.0,
        pieces=list(_pieces(outcome, encoded, encoder, texts)) if is_same else [],
    )


def _pieces(outcome: Outcome, encoded: EncodedCall, encoder: Encoder, texts: SnippetPool) -> Iterator[Piece]:
    """The prompt in order; no piece is empty."""
    runs = {run.start: run for run in outcome.runs}
    seams = {(run.start - run.seam_len, run.start) for run in outcome.runs if run.seam_len}
    fields = {
        start: field for field in outcome.changed_fields if field.end > (start := max(field.start, outcome.prefix_len))
    }
    spans = [run[:2] for run in outcome.runs] + sorted(seams) + [(start, field.end) for start, field in fields.items()]
    cuts = {0, outcome.prefix_len, len(encoded.tokens), *(cut for span in spans for cut in span)}
    # A run is one piece, also where a field in it was found changed beside another donor.
    whole = sorted(cut for cut in cuts if not any(run.start < cut < run.end for run in outcome.runs))
    for start, end in pairwise(whole):
        run, field = runs.get(start), fields.get(start)
        text = texts.add(quote(encoded.text, start, end, _QUOTED_CHARS))
        if run is not None:
            yield Piece(end=end, kind=_MOVED, text=text, shift=run.shift, donor=run.donor.number)
        elif field is not None:
            old = texts.add("".join(encoder.texts[token] for token in field.old))
            yield Piece(end=end, kind=_FIELD, text=text, old=old)
        elif end <= outcome.prefix_len:
            yield Piece(end=end, kind=_PREFIX, text=text)
        else:
            yield Piece(end=end, kind=_SEAM if any(a <= start < b for a, b in seams) else _COMPUTED, text=text)
