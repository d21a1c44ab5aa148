"""Questions over several documents: read from files (JSON lines, plain or packed), or made from seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pic_traces.errors import TraceError
from pic_traces.lines import read_objects

from pic_generate.vocabulary import DATA, WORDS, make_text

GENERATED = ("pairs", "needle", "facts")
"""The kinds of questions: values of keys, a sentence hidden in filler, and facts about persons."""

_NUM_DOCUMENTS = 4
_RETRIEVAL = ("needle", "pairs")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question, its documents, and the right answer."""

    source: str
    name: str
    """The item whose documents it is asked of, `-`, and the number of the question."""
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    supporting: frozenset[int]
    """The documents that hold the answer, where the source says so."""
    lead: str = ""
    """The beginning of the answer, which the model is given."""

    @property
    def is_retrieval(self) -> bool:
        """Whether the answer is a value to be found word for word."""
        return self.source in _RETRIEVAL


class _Document(msgspec.Struct, frozen=True):
    text: str
    title: str = ""


class _Qa(msgspec.Struct, frozen=True):
    question: str
    answers: list[str] = []
    supporting: list[int] | None = None


class _Item(msgspec.Struct, frozen=True):
    id: str
    source: str
    documents: list[_Document]
    qa: list[_Qa]


class _FactWords(msgspec.Struct, frozen=True):
    """Names of persons, values of four facts, a text with the facts' places, and questions with their leads."""

    names: list[str]
    values: dict[str, list[str]]
    life: str
    asking: dict[str, tuple[str, str]]


_FACTS = msgspec.json.decode((DATA / "facts.json").read_bytes(), type=_FactWords)


def is_question_set(path: Path) -> bool:
    """Whether a file's first line is an item with documents and questions."""
    first = next(read_objects(path), None) if path.is_file() else None
    return first is not None and "documents" in first.value and "qa" in first.value


def read_questions(path: Path, *, limit: int, seed: int) -> list[Question]:
    """The first question with an answer of each item, then the second of each, in a seeded order of the items.

    Raises:
        TraceError: the file cannot be read, a line is no item or names a document that is not there, or no question has
            an answer.
    """
    items = []
    for line in read_objects(path):
        try:
            items.append(msgspec.convert(line.value, _Item))
        except msgspec.ValidationError as error:
            raise TraceError(f"{path} line {line.number}: no item with documents and questions: {error}.") from error
    random.Random(f"questions-{seed}").shuffle(items)
    found: list[Question] = []
    for number in range(max((len(item.qa) for item in items), default=0)):
        found += [q for item in items if number < len(item.qa) and (q := _question(item, number)) is not None]
        if len(found) >= limit:
            break
    if not found:
        raise TraceError(f"{path}: no question with an answer.")
    return found[:limit]


def generated_questions(kind: str, *, limit: int, seed: int) -> Iterator[Question]:
    """Seeded questions of one of the kinds in `GENERATED`; small models answer most of them."""
    make = {"pairs": _pairs, "needle": _needle, "facts": _facts}[kind]
    for number in range(limit):
        yield make(random.Random(f"{kind}-{seed}-{number}"), number)


def _question(item: _Item, number: int) -> Question | None:
    qa = item.qa[number]
    if not qa.answers:
        return None
    if wrong := [i for i in qa.supporting or () if not 0 <= i < len(item.documents)]:
        raise TraceError(
            f"{item.id}: supporting={wrong!r}: must be indices into its {len(item.documents)} documents, from 0."
        )
    return Question(
        source=item.source,
        name=f"{item.id}-{number}",
        documents=tuple(f"{d.title}\n{d.text}" if d.title else d.text for d in item.documents),
        question=qa.question,
        answers=tuple(qa.answers),
        supporting=frozenset(qa.supporting or ()),
    )


def _pairs(rng: random.Random, number: int) -> Question:
    """Lists of code words, each of another word."""
    words = rng.sample(WORDS, 2 * 12 * _NUM_DOCUMENTS)
    keys, values = words[: len(words) // 2], words[len(words) // 2 :]
    lines = [f"The code word for {key} is {value}." for key, value in zip(keys, values, strict=True)]
    documents = ["\n".join(lines[12 * i : 12 * (i + 1)]) for i in range(_NUM_DOCUMENTS)]
    asked = rng.randrange(len(keys))
    question, lead = f"What is the code word for {keys[asked]}?", f"The code word for {keys[asked]} is"
    return _generated("pairs", number, documents, question, values[asked], asked // 12, lead)


def _needle(rng: random.Random, number: int) -> Question:
    """One sentence that matters, somewhere in filler."""
    place, thing = rng.sample(WORDS, 2)
    texts = [make_text(rng, 110).split(". ") for _ in range(_NUM_DOCUMENTS)]
    held = rng.randrange(_NUM_DOCUMENTS)
    code = str(rng.randrange(1000, 10000))
    lead = f"The secret number of the {place} {thing} is"
    texts[held].insert(rng.randrange(1, len(texts[held])), f"{lead} {code}")
    question = f"What is the secret number of the {place} {thing}?"
    return _generated("needle", number, [". ".join(text) for text in texts], question, code, held, lead)


def _facts(rng: random.Random, number: int) -> Question:
    """Short lives of persons; each is asked for one of four facts."""
    names, facts, documents = make_lives(rng, _NUM_DOCUMENTS)
    asked, kind = rng.randrange(_NUM_DOCUMENTS), rng.choice(list(_FACTS.asking))
    question, lead = asking(kind, names[asked])
    return _generated("facts", number, documents, question, facts[asked][kind], asked, lead)


def asking(kind: str, name: str) -> tuple[str, str]:
    """A question for a fact of that kind about a person, and the beginning of the answer."""
    question, lead = (words.format(name) for words in _FACTS.asking[kind])
    return question, lead


def make_lives(rng: random.Random, count: int) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """Names of at most six persons, the facts of each by kind, and a short life of each that has them all."""
    names, *columns = (rng.sample(words, count) for words in (_FACTS.names, *_FACTS.values.values()))
    facts = [dict(zip(_FACTS.values, row, strict=True)) for row in zip(*columns, strict=True)]
    return names, facts, [_FACTS.life.format(name=name, **fact) for name, fact in zip(names, facts, strict=True)]


def _generated(
    source: str, number: int, documents: list[str], question: str, answer: str, held: int, lead: str
) -> Question:
    return Question(
        source=source,
        name=f"{source}-{number}-0",
        documents=tuple(documents),
        question=question,
        answers=(answer,),
        supporting=frozenset({held}),
        lead=lead,
    )
