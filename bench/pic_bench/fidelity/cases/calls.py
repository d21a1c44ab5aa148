"""The calls of TRACE, recorded ones with their answers, which are served in order on a cache that lives on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pic_traces.encode import Encoder, load_encoder
from pic_traces.session import Session
from pic_traces.source import limit, load

from pic_bench.fidelity.cases.case import Case, Ids
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import Experiment

GOLD_TOKENS = 32
MAX_ANSWER_TOKENS = 512
_ROOM = 72  # what is generated behind a prompt


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a session; its blocks are whatever the cache finds."""

    session: int
    case: Case
    answer: Ids
    """All of it; gold is its beginning."""


def trace_calls(trace: str, source: str, text: ModelText, model: str, num_calls: int | None) -> list[Call]:
    """The calls of a trace that have an answer and fit into the model's context.

    Raises:
        TraceError: the trace cannot be read, or the model's template refuses a call.
    """
    encoder = load_encoder(model)
    sessions = enumerate(limit(load(trace), num_calls=num_calls))
    found = (call for at, session in sessions for call in session_calls(session, at, source, encoder, text))
    return [call for call in found if call.answer]


def session_calls(session: Session, number: int, source: str, encoder: Encoder, text: ModelText) -> Iterator[Call]:
    """The calls of one session, under a number of its own, that fit into the model's context, also without an answer.

    Raises:
        TraceError: the model's template refuses a call.
    """
    for call in session.calls():
        encoded = encoder.encode(call)
        prompt = encoded.tokens.tolist()
        answer = encoded.path[len(prompt) :][:MAX_ANSWER_TOKENS].tolist()
        if len(prompt) + max(len(answer), _ROOM) < text.context_len:
            case = Case(
                experiment=Experiment.TRACE,
                name=call_name(number, call.index),
                source=source,
                prompt=prompt,
                gold=answer[:GOLD_TOKENS],
            )
            yield Call(number, case, answer)


def call_name(session: int, call: int) -> str:
    """The name of a session's call, both by their numbers."""
    return f"{session:03d}-{call:03d}"
