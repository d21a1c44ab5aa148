"""Prompts of which most was computed elsewhere before, and answers that are right or wrong, for `pic_bench.paired`.

Questions have their documents in another order; so have JSON about persons and edits of source files. The
calls of a trace come behind another clock, a few lines of text and the tools in reverse order.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
from pic_generate.questions import Question, make_lives
from pic_generate.source_code import make_code, make_path
from pic_generate.vocabulary import make_text
from pic_traces.encode import load_encoder
from pic_traces.session import Call, JsonValue, as_type
from pic_traces.source import load

from pic_bench.fidelity.cases.case import Case, place_blocks, words
from pic_bench.fidelity.cases.qa import QaFrames, qa_case
from pic_bench.fidelity.cases.text import ModelText

GOLD_TOKENS = 32
MAX_ANSWER_TOKENS = 64
SPARE_TOKENS = 12
"""Generated beyond the length of a right answer."""
NUM_PERSONS = 6
OTHER_TEXT_TOKENS = 240
FILE_TOKENS = (360, 200)
PROMPT_TOKENS = range(400, 1500)
"""Of a trace, lengths of the calls that are taken."""
MAX_SYSTEM_TOKENS = 400
OTHER_TOOLS = 4
"""Tools that a prompt has beside those that its conversation uses: the shortest ones."""
FRONT_TOKENS = range(40, 240)

Judge = Callable[[str, str], bool]

_DEFAULT = re.compile(r"^def (?P<function>\w+)\(\w+, (?P<parameter>\w+)=(?P<old>\d+)\):$", re.M)
_BLOCK = re.compile(r"<<<<<<< SEARCH\n(.+?)\n=======\n(.+?)\n>>>>>>> REPLACE", re.S)
_ACTION = re.compile(r'"action": "(\w+)"')
_NAME = re.compile(r"\s*([\w.-]+)[^{]*")


class TaskWords(msgspec.Struct, frozen=True):
    """The text of a prompt around its documents."""

    header: str
    asks: str
    lead: str


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    """Of a tool's schema, or of a call."""

    function: _Function


def task_cases(
    questions: Sequence[Sequence[Question]],
    traces: Sequence[str],
    text: ModelText,
    model: str,
    *,
    num: int,
    length: int,
    seed: int,
) -> list[list[Case]]:
    """`num` prompts of each set of questions, of each trace, of JSON and of edits.

    Args:
        length: how many times the usual documents they have.

    Raises:
        TraceError: a trace cannot be read, or the model's template refuses a call.
    """
    frames = QaFrames(text)
    kinds: list[Iterator[Case]] = [
        (qa_case(frames, text, question, seed=seed, length=length) for question in some) for some in questions
    ]
    kinds += [_calls(trace, text, model, seed, length) for trace in traces]
    kinds += [map(partial(make, frames, text, seed, length), range(num)) for make in (_json_case, _edit_case)]
    return [list(islice(kind, num)) for kind in kinds]


def is_object(wanted: dict[str, str], lead: str, answer: str, _full: str) -> bool:
    """Whether an answer begins with a JSON object of exactly these keys and values."""
    return _decoded(lead + answer) == wanted


def applies(file: str, wanted: str, lead: str, answer: str, _full: str) -> bool:
    """Whether the text to search for is in a file once, and its replacement makes the wanted file of it."""
    found = _BLOCK.search(lead + answer)
    return found is not None and file.count(found[1]) == 1 and file.replace(found[1], found[2]) == wanted


def same_call(answer: str, full: str) -> bool:
    """Whether two answers call the same tool with the same arguments; where one is no call, they do not."""
    return (call := read_call(answer)) is not None and call == read_call(full)


def read_call(answer: str) -> tuple[str, dict[str, object]] | None:
    """The tool that an answer begins with, and the JSON object of its arguments; None where it is no whole call."""
    name = _NAME.match(answer)
    arguments = _decoded(answer[name.end() :]) if name else None
    return (name[1], arguments) if name and arguments is not None else None


def _decoded(text: str) -> dict[str, object] | None:
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _json_case(frames: QaFrames, text: ModelText, seed: int, length: int, number: int) -> Case:
    """An object of all facts about one of several persons; longer prompts have other documents between the persons."""
    said, rng = words("json", TaskWords), random.Random(f"json-{seed}-{number}")
    names, facts, lives = make_lives(rng, NUM_PERSONS)
    asked = rng.randrange(NUM_PERSONS)
    asks = said.asks.format(name=names[asked], keys=", ".join(f'"{key}"' for key in facts[asked]))
    gold = json.dumps(facts[asked]).removeprefix(said.lead)
    judge = partial(is_object, facts[asked], said.lead)
    # A seam leaves too little of one life to be spliced.
    documents = ["\n".join(pair) for pair in zip(lives[::2], lives[1::2], strict=True)]
    documents += [make_text(rng, OTHER_TEXT_TOKENS) for _ in range(2 * (length - 1))]
    return _case(f"json-{number}", frames, text, said, asks, documents, gold, judge, rng)


def _edit_case(frames: QaFrames, text: ModelText, seed: int, length: int, number: int) -> Case:
    """Another default of a function's parameter, in one of `2 * length` files."""
    said, rng = words("edits", TaskWords), random.Random(f"edits-{seed}-{number}")
    files = {make_path(rng): make_code(rng, size, lambda line: len(text.ids(line))) for size in FILE_TOKENS * length}
    path, file = next(iter(files.items()))
    line = rng.choice([found for found in _DEFAULT.finditer(file) if file.count(found[0]) == 1])
    new = str(rng.choice([value for value in range(1, 100) if value != int(line["old"])]))
    changed = line[0].replace(f"={line['old']})", f"={new})")
    asks = said.asks.format(path=path, new=new, **line.groupdict())
    gold = f"{line[0]}\n=======\n{changed}\n>>>>>>> REPLACE"
    judge = partial(applies, file, file.replace(line[0], changed), said.lead)
    documents = [f"{name}\n{code}" for name, code in files.items()]
    return _case(f"edits-{number}", frames, text, said, asks, documents, gold, judge, rng)


def _case(
    name: str,
    frames: QaFrames,
    text: ModelText,
    said: TaskWords,
    asks: str,
    documents: Sequence[str],
    gold: str,
    judge: Judge,
    rng: random.Random,
) -> Case:
    """A prompt with documents in a seeded order, which its donor has in another one."""
    blocks = [text.ids(f"\n{document}") for document in rng.sample(documents, len(documents))]
    prompt, donor = place_blocks(frames.frame(said.header, asks, said.lead), frames.donor, blocks, frames.foreign, rng)
    ids = text.ids(gold)
    return Case(
        name=f"tasks-{name}",
        source=name.partition("-")[0],
        prompt=prompt,
        gold=ids[:GOLD_TOKENS],
        donor=donor,
        judge=judge,
        answer_tokens=min(MAX_ANSWER_TOKENS, len(ids) + SPARE_TOKENS),
    )


def _calls(trace: str, text: ModelText, model: str, seed: int, length: int) -> Iterator[Case]:
    """The tool calls of a trace whose prompts are neither short nor long, each recorded answer once."""
    encoder, source = load_encoder(model), Path(trace).name.partition(".")[0]
    calls = [call for session in load(trace) for call in session.calls() if _tool_of(call)]
    random.Random(f"tasks-{seed}-{source}").shuffle(calls)
    seen: set[str] = set()
    num_prompt_tokens = range(length * PROMPT_TOKENS.start, length * PROMPT_TOKENS.stop)
    for call in calls:
        rng = random.Random(f"tasks-{seed}-{call.session_id}-{call.index}")
        short = _shortened(call, text)
        encoded = encoder.encode(_front(short, "The current time is 2026-03-14 09:26:53.\n"))
        lines = make_text(rng, rng.choice(FRONT_TOKENS))
        moved = _front(short, f"It is Saturday, the 14th of March, a quarter past ten.\n{lines}\n\n")
        moved = msgspec.structs.replace(moved, tools=moved.tools and moved.tools[::-1])
        prompt = encoded.tokens.tolist()
        answer = text.text(encoded.path[len(prompt) :].tolist())
        lead, name, rest = answer.partition(_tool_of(call))
        gold = text.ids(name + rest)
        # The template's end of the turn, and what a model would say after the call, are generated in vain.
        num_tokens = len(gold) + SPARE_TOKENS
        if answer in seen or len(prompt) not in num_prompt_tokens or num_tokens > MAX_ANSWER_TOKENS:
            continue
        seen.add(answer)
        yield Case(
            name=f"tasks-{source}-{call.session_id}-{call.index}",
            source=source,
            prompt=prompt + text.ids(lead),
            gold=gold[:GOLD_TOKENS],
            donor=encoder.encode(moved).tokens.tolist(),
            judge=same_call,
            answer_tokens=num_tokens,
        )


def _tool_of(call: Call) -> str:
    """The name of the tool that the recorded answer calls; empty where it calls none."""
    answer = call.completion or {}
    found = _ACTION.search(str(answer.get("content")))
    return next(iter(_names(answer.get("tool_calls"))), found[1] if found else "")


def _names(tools: JsonValue) -> list[str]:
    """The names of tool schemas or of tool calls."""
    return [tool.function.name for tool in as_type(tools, list[_Tool]) or ()]


def _front(call: Call, front: str) -> Call:
    """The call with a text in front of all others."""
    first, *others = call.messages
    return msgspec.structs.replace(call, messages=[{**first, "content": f"{front}{first['content']}"}, *others])


def _shortened(call: Call, text: ModelText) -> Call:
    """A call with tools, with fewer of them and the first paragraphs of its system message; others as they are.

    Which of the tools that the conversation does not use and which paragraphs are kept depends on lengths alone.
    """
    if not call.tools:
        return call
    schemas = dict(zip(_names(call.tools), call.tools, strict=True))
    used = {_tool_of(call), *(name for message in call.messages for name in _names(message.get("tool_calls")))}
    used |= {*sorted(schemas.keys() - used, key=lambda name: (len(str(schemas[name])), name))[:OTHER_TOOLS]}
    system, *others = call.messages
    kept = ""
    for paragraph in str(system["content"]).split("\n\n"):
        if len(text.ids(kept + paragraph)) > MAX_SYSTEM_TOKENS:
            break
        kept += f"{paragraph}\n\n"
    tools = [tool for name, tool in schemas.items() if name in used]
    return msgspec.structs.replace(call, tools=tools, messages=[{**system, "content": kept}, *others])
