"""The calls of TRACE and TURNS, which are served in order on a cache that lives on.

A trace's calls are recorded ones with their answers. The conversations of TURNS have one field near the top, with
another value at every turn.

    system, with the field | report, question | answer | report, question | answer | ... | report, question

A report has a line that draws on the field, so that its value is mentioned; the clock's value is mentioned nowhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from pic_traces.encode import Encoder, load_encoder
from pic_traces.session import Session
from pic_traces.source import limit, load
from pic_traces.vocabulary import WORDS, make_text

from pic_bench.fidelity.cases.case import Case, Ids, words
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import Change, Experiment
from sglang_pic.errors import ConfigError

GOLD_TOKENS = 32
MAX_ANSWER_TOKENS = 512
_ROOM = 128  # an answer and the generated token
_TRACE_ROOM = 72  # what is generated behind a prompt
_REPORT_TOKENS = (20, 60)


class _Words(msgspec.Struct, frozen=True):
    system: str
    field: str
    clock: str
    keepers: list[str]


_WORDS = words("depots", _Words)


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
        if len(prompt) + max(len(answer), _TRACE_ROOM) < text.context_len:
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


def conversation(change: Change, num_turns: int, text: ModelText, seed: int) -> list[Call]:
    """Every turn's prompt with its answer as gold; what was said before is the same in all prompts that follow.

    Raises:
        ConfigError: the model's context has no room for the last turn.
    """
    rng = random.Random(f"turns-{change.value}-{seed}")
    depots = _depots(change, num_turns, rng)
    keepers = {depot: rng.choice(_WORDS.keepers) for depot in sorted(set(depots))}
    said: list[str] = []
    calls = []
    for number, depot in enumerate(depots):
        question, answer = _ask(change, number, depot, keepers[depot])
        report = make_text(rng, rng.randint(*_REPORT_TOKENS)).rstrip(".")
        said.append(f"{report}. Depot {depot} is in the care of {keepers[depot]}. {question}")
        case = Case(
            experiment=Experiment.TURNS,
            name=f"{change.name.lower()}-{number:02}",
            source=change.value,
            prompt=text.conversation(_WORDS.system.format(field=_field(change, depot, number)), said),
            gold=text.ids(answer),
        )
        calls.append(Call(0, case, case.gold))
        said.append(answer)
    if (longest := len(calls[-1].case.prompt) + _ROOM) > text.context_len:
        raise ConfigError(
            f"turns={num_turns}: the last one needs {longest} tokens, the model's context has {text.context_len}; give "
            "fewer turns."
        )
    return calls


def _depots(change: Change, num_turns: int, rng: random.Random) -> list[str]:
    """The depot that each turn speaks of: the field's value, but for the clock."""
    capitalized = [word.capitalize() for word in WORDS if len(word) > 3]
    names = iter(rng.sample(capitalized, 2 * num_turns + 2))
    new = [f"{first} {second}" for first, second in zip(names, names, strict=True)]
    if change is Change.TOGGLE:
        return [new[number % 2] for number in range(num_turns)]
    if change is Change.RETURN:
        return [new[number if number % 2 else 0] for number in range(num_turns)]
    return new[:num_turns]


def _field(change: Change, depot: str, number: int) -> str:
    if change is Change.CLOCK:
        hours, minutes = divmod(8 * 60 + 7 * number, 60)
        return _WORDS.clock.format(value=f"{hours % 24:02}:{minutes:02}")
    return _WORDS.field.format(value=depot)


def _ask(change: Change, number: int, depot: str, keeper: str) -> tuple[str, str]:
    """Question and answer: every second one is about the keeper, whom the field alone does not name."""
    named = f"depot {depot}" if change is Change.CLOCK else "the depot in use"
    if number % 2:
        return f"Who has the care of {named}?", f"Depot {depot} is in the care of {keeper}."
    return f"Where is {keeper}, who has the care of {named}?", f"{keeper} is at depot {depot}."
