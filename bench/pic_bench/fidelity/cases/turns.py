"""The conversations of the experiment TURNS: one field near the top, with another value at every turn.

    system, with the field | report, question | answer | report, question | answer | ... | report, question

A report has a line that draws on the field, so that its value is mentioned; the clock's value is mentioned nowhere.
"""

from __future__ import annotations

import random

from pic_traces.vocabulary import WORDS, make_text

from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.record import Change, Experiment
from sglang_pic.errors import ConfigError

_ROOM = 128  # an answer and the generated token
_REPORT_TOKENS = (20, 60)
_KEEPERS = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis")
_SYSTEM = (
    "You answer questions for a parcel service that has many depots. Each depot is in the care of one keeper, and all "
    "parcels of the day go to the depot that is in use. The dispatcher may change it at any time.\n{field}\n"
    "Reports come in from drivers and keepers in their own words, and most of what they say needs no answer. Read the "
    "report, then answer the question behind it in one short sentence, by what is true now."
)
_DEPOT_FIELD = "The depot in use is {value}."
_CLOCK_FIELD = "It is {value}."


def conversation(change: Change, num_turns: int, text: ModelText, seed: int) -> list[Case]:
    """Every turn's prompt with its answer as gold; what was said before is the same in all prompts that follow.

    Raises:
        ConfigError: the model's context has no room for the last turn.
    """
    rng = random.Random(f"turns-{change.value}-{seed}")
    depots = _depots(change, num_turns, rng)
    keepers = {depot: rng.choice(_KEEPERS) for depot in sorted(set(depots))}
    fields = [_field(change, depot, minute) for minute, depot in enumerate(depots)]
    said: list[str] = []
    cases = []
    for number, (field, depot) in enumerate(zip(fields, depots, strict=True)):
        question, answer = _ask(change, number, depot, keepers[depot])
        report = make_text(rng, rng.randint(*_REPORT_TOKENS)).rstrip(".")
        said.append(f"{report}. Depot {depot} is in the care of {keepers[depot]}. {question}")
        prompt = text.conversation(_SYSTEM.format(field=field), said)
        name = f"{change.name.lower()}-{number:02}"
        gold = text.ids(answer)
        cases.append(Case(experiment=Experiment.TURNS, name=name, source=change.value, prompt=prompt, gold=gold))
        said.append(answer)
    if (longest := len(cases[-1].prompt) + _ROOM) > text.context_len:
        raise ConfigError(
            f"turns={num_turns}: the last one needs {longest} tokens, the model's context has {text.context_len}; give "
            "fewer turns."
        )
    return cases


def _depots(change: Change, num_turns: int, rng: random.Random) -> list[str]:
    """The depot that each turn speaks of: the field's value, but for the clock."""
    words = [word.capitalize() for word in WORDS if len(word) > 3]
    new = [f"{first} {second}" for first, second in zip(*[iter(rng.sample(words, 2 * num_turns + 2))] * 2, strict=True)]
    if change is Change.TOGGLE:
        return [new[number % 2] for number in range(num_turns)]
    if change is Change.RETURN:
        return [new[number if number % 2 else 0] for number in range(num_turns)]
    return new[:num_turns]


def _field(change: Change, depot: str, number: int) -> str:
    if change is Change.CLOCK:
        hours, minutes = divmod(8 * 60 + 7 * number, 60)
        return _CLOCK_FIELD.format(value=f"{hours % 24:02}:{minutes:02}")
    return _DEPOT_FIELD.format(value=depot)


def _ask(change: Change, number: int, depot: str, keeper: str) -> tuple[str, str]:
    """Question and answer: every second one is about the keeper, whom the field alone does not name."""
    named = f"depot {depot}" if change is Change.CLOCK else "the depot in use"
    if number % 2:
        return f"Who has the care of {named}?", f"Depot {depot} is in the care of {keeper}."
    return f"Where is {keeper}, who has the care of {named}?", f"{keeper} is at depot {depot}."
