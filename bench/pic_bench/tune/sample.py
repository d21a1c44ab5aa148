"""Draws sessions from logs, and of each session one call, which is measured; the others are its history.

    sessions in a drawn order:  s0 s1 ... | sk ... sn      the first half chooses settings, the second certifies them
    all calls of each are served, in their order, on a cache that fills from s0 on

The order is drawn too: so no session has others behind it than chance gave it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pic_traces.encode import load_encoder
from pic_traces.source import load

from pic_bench.fidelity.cases.calls import Call, session_calls
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.tune.config import Sample
from sglang_pic.errors import BenchError

SOURCE = "tune"
"""Of all records."""


class Drawn(NamedTuple):
    """The calls to serve, in order."""

    calls: list[Call]
    measured: frozenset[str]
    """Names of the calls that are measured, one of each session."""
    sample: Sample


def draw(logs: Sequence[str], model: str, text: ModelText, most: int, seed: int) -> Drawn:
    """Draw at most so many sessions with a call that fits into the context; the same seed draws the same.

    Raises:
        TraceError: a log cannot be read, or the model's template refuses a call.
        BenchError: no call fits into the model's context.
    """
    sessions = [session for log in logs for session in load(log)]
    rng, encoder = random.Random(f"tune-{seed}"), load_encoder(model)
    rng.shuffle(sessions)
    calls: list[Call] = []
    measured: set[str] = set()
    left_out = 0
    for session in sessions:
        if len(measured) == most:
            break
        found = list(session_calls(session, len(measured), SOURCE, encoder, text))
        left_out += session.num_calls - len(found)
        if found:
            measured.add(rng.choice(found).case.name)
            calls += found
    if not calls:
        raise BenchError(f"no call of the logs fits into the model's context of {text.context_len} tokens.")
    sample = Sample(
        logged=len(sessions),
        sessions=len(measured),
        calls=len(calls),
        left_out=left_out,
        traffic=_digest(calls),
        reuse={},
    )
    return Drawn(calls, frozenset(measured), sample)


def _digest(calls: Iterable[Call]) -> str:
    found = hashlib.sha256()
    for call in calls:
        found.update(repr((call.session, call.case.prompt, call.answer)).encode())
    return found.hexdigest()
