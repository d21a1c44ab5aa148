"""Draws sessions from logs, and of each session one call, which is measured; the others are its history.

    sessions in a drawn order:  s0 s1 ... | sk ... sn      the first half chooses settings, the second certifies them
    all calls of each are served, in their order, on a cache that fills from s0 on

The order is drawn too: so no session has others behind it than chance gave it. Calls behind a changed field are few,
and lose most: of each session that has any, one of these is drawn as well. It counts among its like only, so that the
first draw stays one from all calls.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pic_traces.encode import load_encoder
from pic_traces.encode.encoded import Encoder
from pic_traces.session import Session
from pic_traces.source import load

from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.passes import Call, call_name, session_calls
from pic_bench.tune.config import Sample
from sglang_pic.census.simulate import CacheScope, simulate
from sglang_pic.errors import BenchError

SOURCE = "tune"  # of all records


class Drawn(NamedTuple):
    """The calls to serve, in order."""

    calls: list[Call]
    measured: frozenset[str]
    """Names of the calls that are measured."""
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
    served: list[Session] = []
    drawn: list[str] = []
    left_out = 0
    for session in sessions:
        if len(served) == most:
            break
        found = list(session_calls(session, len(served), SOURCE, encoder, text))
        left_out += session.num_calls - len(found)
        if found:
            drawn.append(rng.choice(found).case.name)
            served.append(session)
            calls += found
    if not calls:
        raise BenchError(f"no call of the logs fits into the model's context of {text.context_len} tokens.")
    served_text = b"".join(repr((call.session, call.case.prompt, call.answer)).encode() for call in calls)
    sample = Sample(
        logged=len(sessions),
        sessions=len(served),
        calls=len(calls),
        left_out=left_out,
        traffic=hashlib.sha256(served_text).hexdigest(),
        reuse={},
        drawn=tuple(drawn),
        changed=tuple(_draw_changed(served, {call.case.name for call in calls}, encoder, seed)),
    )
    return Drawn(calls, frozenset((*sample.drawn, *sample.changed)), sample)


def _draw_changed(sessions: Sequence[Session], served: AbstractSet[str], encoder: Encoder, seed: int) -> Iterable[str]:
    """Of each session one of the served calls with text behind a changed field, by the census with the defaults."""
    files = [(str(number), [session]) for number, session in enumerate(sessions)]
    found: dict[str, list[str]] = defaultdict(list)
    for outcome in simulate(files, encoder, scope=CacheScope.ALL):
        name = call_name(int(outcome.ref.file), outcome.ref.index)
        if name in served and (outcome.num_behind_change or outcome.num_guarded):
            found[outcome.ref.file].append(name)
    return map(random.Random(f"tune-{seed}").choice, found.values())
