"""Prompts by kind, each with the requests before it whose rows it may take.

order    questions, JSON and edits of files over documents that one request had in another order
drawn    the same, but each third of the documents was computed in another request, beside those of another prompt
tools    calls of a trace behind another clock and a few lines that were not there, with the tools in reverse order
copies   a function of one of several files is written out word for word; the files were in another order
gone     the request before had a correction of what is asked, behind it or in front of it, short as a field or longer;
         each is a kind of its own, the longer ones `planted`
fields   a prompt behind the same prompt with other values; a kind for each way in which answers depend on them
again    calls of traces that end in the result of a tool, which was read some steps earlier too: the request before had
         the session up to there and the same result behind it; a kind for each trace
compacted, cleared
         calls of traces that answer the result of a tool, in a session that was compacted: a summary stands in the
         place of its older steps, or a line in that of older results; the request before had all of them
NAME     the calls of a trace or of a generator (`gen:compact`), whose donors are all calls before them
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import msgspec
from pic_generate.questions import (
    GENERATED,
    Question,
    asking,
    generated_questions,
    is_question_set,
    make_lives,
    read_questions,
)
from pic_generate.source_code import make_code, make_path
from pic_generate.vocabulary import make_text
from pic_traces.encode import Encoder
from pic_traces.session import Call, Message
from pic_traces.source import load

from pic_bench.fidelity.cases.case import Case, Ids, Tokens, lay_out, place_blocks
from pic_bench.fidelity.cases.edits import DISTANCES, TemplateSet, edit_case, templates
from pic_bench.fidelity.cases.qa import QaFrames
from pic_bench.fidelity.cases.tasks import task_cases
from pic_bench.fidelity.cases.text import ModelText
from sglang_pic.census.simulate import NAMESPACE, Cache
from sglang_pic.core import CoreConfig, Plan, PlanOptions, ReusePolicy, RowSource, as_tokens
from sglang_pic.core import Path as DonorPath

T = TypeVar("T")

ANSWER_TOKENS = 32
COPIED_TOKENS = 128
TRACE_TOKENS = 1536
"""Most tokens of a trace's prompt."""
LEAST_SPLICED = 256
"""Fewest tokens that the boldest policy splices of a trace's call."""
LEAST_READ, _MOST_READ = 192, 1024
"""Tokens of a result that is read again."""
UNREAD = (96, 0.45)
"""Text before such a result that the request before had not: fewest tokens, and the largest share of the prompt."""
CLEARED = "[Old tool result content cleared]"
LEAST_GONE = 192
"""Tokens by which compaction shortens a session."""
_SUMMED_CHARACTERS = 120
"""Of each step in a summary."""
_CHARACTERS_OF_TOKEN = 8
"""A longer text is not encoded to find that it is too long."""
_OF_A_SESSION, _SYSTEM_CHARACTERS = 12, 3200
_FILES, _FILE_TOKENS = 4, 260
_PERSONS = 5
GONE_TOKENS = (120, 240, 480, 720)
"""Tokens between the text that is gone and the question."""
_INSISTS = (
    " Two clerks of the archive have compared the notes with the original register, page by page, and both found "
    "{wrong} there; they have signed this correction. Whoever answers {value} when he is asked for the {key} of {name} "
    "repeats the mistake, and will be asked to write his answer again. To make it plain once more for everybody who "
    "reads this later: the {key} of {name} is {wrong}, it has always been {wrong}, and {wrong} is what has to be "
    "answered, whatever else is written about {name} in these notes."
)
"""Longer than a changed field."""
_FUNCTION = re.compile(r"^def (\w+)\(.*?(?=\n\n|\Z)", re.M | re.S)

Judge = Callable[[str, str], bool]
MakePrompt = Callable[[Call, int, random.Random], "Step | None"]
"""The prompt of a call whose message at a place is a result."""
Compact = Callable[[Sequence[Message]], list[Message]]


class Step(NamedTuple):
    """An agent's prompt that ends in the result of a tool."""

    ids: Ids
    answer: Ids
    before: Ids
    """The request before."""
    whole: Ids | None = None
    """What a compacted one would be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, and the spans that each policy would splice from the requests before it."""

    kind: str
    name: str
    ids: Ids
    prefix_len: int
    """Of the exact prefix that they left."""
    plans: Mapping[str, Plan]
    gold: Ids
    """The beginning of a right answer; only speeds up the full prefill's own answer."""
    num_tokens: int = ANSWER_TOKENS
    """Longest answer that is compared."""
    judge: Judge | None = None
    """Whether an answer is right, given it and the full prefill's; None where only equal is right."""
    answers: Tokens | None = None
    """Of `fields`: the first tokens of the old and of the new answer."""
    whole: Ids | None = None
    """Of a compacted session: what the prompt would be without."""


def donor_ends(plans: Mapping[str, Plan]) -> dict[DonorPath, int]:
    """The donors of all plans, and how many leading tokens of each they need."""
    ends: dict[DonorPath, int] = {}
    for run in chain.from_iterable(plan.runs for plan in plans.values()):
        ends[run.donor] = max(run.donor_end, ends.get(run.donor, 0))
    return ends


class Requests:
    """Requests in order, all of whose rows stay: the spans that each policy splices in the next one.

    Args:
        encoder: of the model, for the texts of its tokens.
        policies: by name.
    """

    def __init__(self, encoder: Encoder, policies: Mapping[str, ReusePolicy]) -> None:
        self._cache, self._numbers = Cache(CoreConfig(), encoder), count()
        self._options = {name: PlanOptions(max_gaps=64, max_runs=64, policy=each) for name, each in policies.items()}

    def plan(self, ids: Ids) -> tuple[int, dict[str, Plan]]:
        """The length of a prompt's exact prefix, less than all of it, and its plan under each policy."""
        tokens = as_tokens(ids)
        self._cache.learn()
        prefix = min(self._cache.prefixes.match(tokens).prefix_len, len(ids) - 1)
        plan = partial(self._cache.index.plan, NAMESPACE, tokens, prefix_len=prefix, rows=RowSource())
        return prefix, {name: plan(options=each) for name, each in self._options.items()}

    def add(self, ids: Ids) -> None:
        """A request was computed in full."""
        tokens = as_tokens(ids)
        prefix_len = self._cache.prefixes.match(tokens).prefix_len
        prefix = self._cache.index.exactness(NAMESPACE, tokens[:prefix_len])
        self._cache.keep(tokens, next(self._numbers), prefix_len, prefix)


@dataclass(frozen=True, slots=True)
class Cases:
    """The prompts of one model.

    Args:
        model: its folder.
        policies: that plans are made for; `most` is one of them.
        data: files of questions, beside the generated ones, and traces with calls of tools.
        length: how many times the usual documents a prompt has.
        longest: most tokens of a trace's prompt; its donors have twice as many at most.
    """

    model: Path
    policies: Mapping[str, ReusePolicy]
    data: Sequence[Path]
    seed: int
    length: int
    longest: int
    text: ModelText
    encoder: Encoder

    def of(self, kind: str, num: int) -> Iterator[Prompt]:
        """Candidates of a kind, `num` at most of each of its sources."""
        made = {"order": self._order, "drawn": self._drawn, "tools": self._tools}
        made |= {"copies": self._copies, "gone": self._gone, "fields": self._fields}
        of_steps: dict[str, MakePrompt] = {"again": self._made_again}
        of_steps |= {
            "compacted": partial(self._made_shorter, _summed),
            "cleared": partial(self._made_shorter, _cleared),
        }
        if kind in of_steps:
            traces = [path for path in self.data if not is_question_set(path)]
            return in_turn([self._steps(kind, path, num, of_steps[kind]) for path in traces])
        return made[kind](num) if kind in made else self._calls(kind, num)

    def _order(self, num: int) -> Iterator[Prompt]:
        for case in self._documents(num):
            yield self._prompt("order", case)

    def _drawn(self, num: int) -> Iterator[Prompt]:
        frames, others = QaFrames(self.text), list[Ids]()
        for case in self._documents(num):
            assert case.donor is not None
            requests = Requests(self.encoder, self.policies)
            requests.add(case.donor)
            blocks = [
                case.prompt[run.target_start - run.seam_len : run.target_end]
                for run in requests.plan(case.prompt)[1]["most"].runs
            ]
            rng = random.Random(f"drawn-{self.seed}-{case.name}")
            rng.shuffle(blocks)
            donors = [
                lay_out(frames.donor, [frames.foreign, *rng.sample(others, min(3, len(others))), *blocks[third::3]])[0]
                for third in range(3)
            ]
            if others:
                yield self._prompt("drawn", case, donors)
            others = blocks

    def _tools(self, num: int) -> Iterator[Prompt]:
        traces = [str(path) for path in self.data if not is_question_set(path)]
        found = task_cases([], traces, self.text, str(self.model), num=num, length=1, seed=self.seed)
        for case in in_turn(found[: len(traces)]):
            yield self._prompt("tools", case)

    def _copies(self, num: int) -> Iterator[Prompt]:
        frames = QaFrames(self.text)
        header = "You are shown some files. Write out what you are asked for exactly as it stands, and nothing else."
        for number in range(num):
            rng = random.Random(f"copies-{self.seed}-{number}")
            num_files = _FILES * self.length // 2
            files = {make_path(rng): make_code(rng, _FILE_TOKENS, self._count) for _ in range(num_files)}
            path, code = rng.choice([*files.items()])
            found = [each for each in _FUNCTION.finditer(code) if each[0].count("\n") >= 5]
            if not found:
                continue
            function = rng.choice(found)
            lead, gold = f"```python\ndef {function[1]}(", function[0].removeprefix(f"def {function[1]}(")
            asks = f"Task: Write out the function {function[1]} of {path} word for word."
            frame = frames.frame(f"{header} {' '.join(['Change nothing.'] * 12)}", asks, lead)
            blocks = [self.text.ids(f"\n{name}\n{each}") for name, each in files.items()]
            prompt, donor = place_blocks(frame, frames.donor, blocks, frames.foreign, rng)
            ids = self.text.ids(gold)
            yield self._made(
                "copies",
                f"copies-{number}",
                prompt,
                [donor],
                ids,
                min(COPIED_TOKENS, len(ids)),
                partial(_begins_with, gold),
            )

    def _count(self, text: str) -> int:
        return len(self.text.ids(text))

    def _gone(self, num: int) -> Iterator[Prompt]:
        """The correction stands some way before the question, so that the end of the prompt repeats too."""
        header = (
            "You answer questions about persons from the notes that you are shown, in one word. A correction holds "
            "against what stands before it, and against nothing else. Never guess what no note says of a person."
        )
        for number in range(num):
            rng = random.Random(f"gone-{self.seed}-{number}")
            names, facts, lives = make_lives(rng, _PERSONS)
            asked, other = rng.sample(range(_PERSONS), 2)
            key = rng.choice([*facts[asked]])
            value, wrong = facts[asked][key], facts[other][key]
            question, lead = asking(key, names[asked])
            correction = (
                f"Correction of the archive, to be followed from here on: the {key} of {names[asked]} is not {value} "
                f"but {wrong}. Whatever the notes above say of the {key} of {names[asked]} is a mistake of the writer, "
                f"and the right answer is {wrong}."
            )
            is_long, is_behind = number // 2 % 2 == 1, number % 2 == 0
            if is_long:
                correction += _INSISTS.format(value=value, wrong=wrong, name=names[asked], key=key)
            distance = GONE_TOKENS[number // 4 % len(GONE_TOKENS)]
            behind = make_text(rng, distance)
            asks = f"{behind}\n\nQuestion: {question}"
            notes = "\n".join(lives)
            said = [
                f"{notes}\n{correction}\n{asks}" if is_behind else f"{correction}\n{notes}\n{asks}",
                f"{notes}\n{asks}",
            ]
            old, ids = (self.text.conversation(header, [each]) + self.text.ids(lead) for each in said)
            tokens = Tokens(*(self.text.ids(f" {each}")[0] for each in (wrong, value)))
            if tokens.old != tokens.new:
                kind = f"{'planted' if is_long else 'gone'}-{'behind' if is_behind else 'front'}"
                yield self._made(
                    kind, f"gone-{number}-{distance}", ids, [old], [tokens.new], 12, partial(_has, value), tokens
                )

    def _fields(self, num: int) -> Iterator[Prompt]:
        sets = (TemplateSet.REPORT, TemplateSet.WORDS)
        chosen = [each for of in sets for each in templates(of)]
        random.Random(f"fields-{self.seed}").shuffle(chosen)
        for round_, place in (divmod(number, len(chosen)) for number in range(num)):
            distance = DISTANCES[(place + round_) % len(DISTANCES)]
            case = edit_case(chosen[place], self.text, distance, round_, self.seed)
            edited = case.edited
            assert edited is not None
            kind, name = f"fields-{edited.family.value}", f"{case.name}-{distance}"
            yield self._made(kind, name, case.prompt, [edited.old], [edited.answers.new], answers=edited.answers)

    def _calls(self, source: str, num: int) -> Iterator[Prompt]:
        """Calls in a seeded order of the sessions, two of each at most, no answer twice."""
        sessions = list(load(source))
        random.Random(f"calls-{self.seed}").shuffle(sessions)
        requests, seen = Requests(self.encoder, self.policies), set[tuple[int, ...]]()
        kind, found = _trace_name(source), 0
        for session in sessions:
            taken = 0
            for call in session.calls():
                encoded = self.encoder.encode(call)
                ids, path = encoded.tokens.tolist(), encoded.path.tolist()
                gold = path[len(ids) :][:ANSWER_TOKENS]
                if len(ids) <= self.longest and taken < 2 and tuple(gold) not in seen:
                    prefix, plans = requests.plan(ids)
                    most = plans["most"]
                    # Calls have their text in order: one arm less.
                    plans.pop("any-order", None)
                    num_donors = sum(donor_ends(plans).values())
                    if most.num_spliced >= LEAST_SPLICED and num_donors <= 2 * self.longest:
                        seen.add(tuple(gold))
                        taken, found = taken + 1, found + 1
                        name = f"{session.session_id}-{call.index}"
                        yield Prompt(kind=kind, name=name, ids=ids, prefix_len=prefix, plans=plans, gold=gold)
                if len(path) <= 2 * self.longest:
                    requests.add(path)
            if found >= num:
                return

    def _steps(self, kind: str, path: Path, num: int, make: MakePrompt) -> Iterator[Prompt]:
        """The prompts of one trace of which `most` splices `LEAST_SPLICED`, of a few results of each session."""
        sessions = list(load(str(path)))
        rng = random.Random(f"{kind}-{self.seed}")
        rng.shuffle(sessions)
        kind, found = f"{kind}-{_trace_name(str(path))}", 0
        for session in sessions:
            longest = max(session.calls(), key=lambda call: len(call.messages))
            messages = [_shortened(each) for each in longest.messages]
            call = msgspec.structs.replace(longest, tools=None, messages=messages)
            places = [at for at in range(5, len(messages) - 1) if _is_step(messages[at - 1 : at + 2])]
            taken = 0
            for at in rng.sample(places, len(places)):
                made = make(call, at, rng)
                if made is None or len(made.answer) < ANSWER_TOKENS:
                    continue
                gold = made.answer[:ANSWER_TOKENS]
                prompt = self._made(kind, f"{session.session_id}-{at}", made.ids, [made.before], gold)
                prompt = replace(prompt, whole=made.whole)
                if prompt.plans["most"].num_spliced >= LEAST_SPLICED:
                    taken += 1
                    yield prompt
                if taken == _OF_A_SESSION:
                    break
            found += taken
            if found >= num:
                return

    def _encoded(self, call: Call, messages: Sequence[Message], answer: Message | None = None) -> tuple[Ids, Ids]:
        """A prompt of these messages, and its answer."""
        made = self.encoder.encode(msgspec.structs.replace(call, messages=[*messages], completion=answer))
        num = len(made.tokens)
        return made.path[:num].tolist(), made.path[num:].tolist()

    def _made_again(self, call: Call, at: int, rng: random.Random) -> Step | None:
        """A session up to its answer to a result, behind the same without some of the steps before it; None if its text
        is too short or too long."""
        *before, asks, result, answer = call.messages[: at + 2]
        length = len(self.text.ids(str(result.get("content") or "")))
        starts = _starts(before)
        if not LEAST_READ <= length <= _MOST_READ:
            return None
        for start in starts[::-1]:
            ids, gold = self._encoded(call, [*before[:2], *before[start:], asks, result], answer)
            if len(ids) > self.longest:
                return None
            last = rng.choice([at for at in starts if at >= start] + [len(before)])
            old, _ = self._encoded(call, [*before[:2], *before[last:], asks, result])
            if UNREAD[0] <= len(ids) - len(old) <= UNREAD[1] * len(ids):
                return Step(ids, gold, old)
        return None

    def _made_shorter(self, compact: Compact, call: Call, at: int, rng: random.Random) -> Step | None:
        """A session up to its answer to a result, its older steps compacted, behind the whole session up to the call of
        that tool; None if little is gone, or the whole is too long."""
        *before, asks, result, answer = call.messages[: at + 2]
        start = rng.choice(_starts(before)[1:] or [2])
        if sum(len(str(each.get("content"))) for each in before) > 2 * self.longest * _CHARACTERS_OF_TOKEN:
            return None
        old = [each for part in self._encoded(call, before, asks) for each in part]
        shorter = [*before[:2], *compact(before[2:start]), *before[start:], asks]
        ids, gold = self._encoded(call, [*shorter, result], answer)
        if len(old) > 2 * self.longest or len(ids) > self.longest:
            return None
        is_shorter = len(old) - len(self._encoded(call, shorter)[0]) >= LEAST_GONE
        return Step(ids, gold, old, self._encoded(call, [*before, asks, result])[0]) if is_shorter else None

    def _documents(self, num: int) -> Iterator[Case]:
        """Questions, JSON and edits in turn."""
        sets = [path for path in self.data if is_question_set(path)]
        questions: list[Sequence[Question]] = [read_questions(path, limit=num, seed=self.seed) for path in sets]
        questions += [list(generated_questions(kind, limit=num, seed=self.seed)) for kind in GENERATED]
        found = task_cases(questions, (), self.text, str(self.model), num=num, length=self.length, seed=self.seed)
        for case in in_turn(found):
            yield replace(case, answer_tokens=min(case.answer_tokens, len(case.gold) + 4))

    def _prompt(self, kind: str, case: Case, donors: Sequence[Ids] | None = None) -> Prompt:
        """The prompt of a case behind its own donor, or behind others."""
        assert case.donor is not None
        name, donors = case.name.removeprefix("tasks-"), donors or [case.donor]
        return self._made(kind, name, case.prompt, donors, case.gold, case.answer_tokens, case.judge)

    def _made(
        self,
        kind: str,
        name: str,
        ids: Ids,
        donors: Sequence[Ids],
        gold: Ids,
        num_tokens: int = ANSWER_TOKENS,
        judge: Judge | None = None,
        answers: Tokens | None = None,
    ) -> Prompt:
        requests = Requests(self.encoder, self.policies)
        for donor in donors:
            requests.add(donor)
        prefix, plans = requests.plan(ids)
        return Prompt(
            kind=kind,
            name=name,
            ids=ids,
            prefix_len=prefix,
            plans=plans,
            gold=gold,
            num_tokens=num_tokens,
            judge=judge,
            answers=answers,
        )


def in_turn(sources: Iterable[Iterable[T]]) -> Iterator[T]:
    """One of each source in turn, until all have ended."""
    ended = object()
    for found in chain.from_iterable(zip_longest(*sources, fillvalue=ended)):
        if found is not ended:
            yield cast(T, found)


def _trace_name(source: str) -> str:
    """Of a trace's file, or of a generator and its arguments."""
    return re.sub(r"\W+", "-", Path(source).name.removeprefix("gen:").partition(".")[0].partition("?")[0])


def _is_step(messages: Sequence[Message]) -> bool:
    """Whether an agent calls a tool, reads its result and answers."""
    return [each["role"] == "assistant" for each in messages] == [True, False, True]


def _starts(messages: Sequence[Message]) -> list[int]:
    """Where steps begin after the task."""
    return [at for at in range(2, len(messages)) if messages[at]["role"] == "assistant"]


def _action(message: Message) -> str:
    """The beginning of what an agent said or did."""
    said = f"{message.get('content') or ''} {msgspec.json.encode(message.get('tool_calls') or '').decode()}"
    return " ".join(said.split())[:_SUMMED_CHARACTERS]


def _summed(steps: Sequence[Message]) -> list[Message]:
    """A summary of steps."""
    done = [f"- {_action(each)}" for each in steps if each["role"] == "assistant"]
    summary = "\n".join(["This conversation continues an earlier one. What was done there:", *done])
    return [{"role": "user", "content": summary}]


def _cleared(steps: Sequence[Message]) -> list[Message]:
    """The steps with a line in the place of each result."""
    return [each if each["role"] == "assistant" else {**each, "content": CLEARED} for each in steps]


def _shortened(message: Message) -> Message:
    """A system prompt's beginning; other messages as they are."""
    content = message.get("content")
    if message["role"] != "system" or not isinstance(content, str):
        return message
    return {**message, "content": content[:_SYSTEM_CHARACTERS]}


def _begins_with(gold: str, answer: str, _full: str) -> bool:
    """Whether a copy is right as far as it was written."""
    return bool(answer) and (answer.startswith(gold) or gold.startswith(answer))


def _has(value: str, answer: str, _full: str) -> bool:
    return value.lower() in answer.lower()
