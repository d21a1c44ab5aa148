"""Calls written by hand for tests of `explain`, and what the census makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator

from pic_traces.encode import load_encoder
from pic_traces.session import Call, Message

from sglang_pic.census.outcome import CallRef, Outcome
from sglang_pic.census.simulate import Cache
from sglang_pic.core import MOST_REUSE, CoreConfig
from sglang_pic.explain.cause import Cause
from sglang_pic.explain.diagnose import Break, Diagnoser
from sglang_pic.explain.token_texts import TokenTexts

BODY = " ".join(f"word{number % 7} of{number % 11} many{number % 13}" for number in range(60))


def chat(*contents: str) -> list[Message]:
    """Messages of alternating roles, the first one the system's."""
    roles = ["system", *(["user", "assistant"] * len(contents))]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def call_of(
    messages: list[Message], answer: str = "ok", *, session: str = "s", index: int = 0, agent: str | None = None
) -> Call:
    """One call with its answer."""
    completion: Message = {"role": "assistant", "content": answer}
    return Call(
        session_id=session, index=index, messages=messages, completion=completion, tools=None, agent=agent, options={}
    )


def prices(*values: str) -> list[Call]:
    """Calls that differ in one field, whose value `eight` is named again further on."""
    half = len(BODY) // 2
    return [
        call_of(chat(f"Price: {value}. {BODY[:half]} Not eight. {BODY[half:]}", "Buy?"), index=number)
        for number, value in enumerate(values)
    ]


def serve(calls: Iterable[Call], config: CoreConfig = MOST_REUSE) -> Iterator[Outcome]:
    """One cache for all calls, in this order."""
    encoder = load_encoder(None)
    cache = Cache(config, encoder)
    for number, call in enumerate(calls):
        ref = CallRef(number, "trace.jsonl", call.session_id, call.index)
        yield cache.serve(ref, call.agent, encoder.encode(call))


WORDS = ["red", "blue", "fast", "slow", "tree", "house", "river", "stone", "cloud", "light", "paper", "glass", "north"]


def prose(seed: int, num_words: int = 150) -> str:
    """Different text for every seed, the same for the same one."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def breaks(outcomes: Iterable[Outcome]) -> Iterator[tuple[Outcome, Break | None]]:
    """Each outcome and what broke there."""
    texts = TokenTexts()
    diagnoser = Diagnoser(texts.decode)
    for outcome in outcomes:
        found = diagnoser.diagnose(outcome)
        assert found is None or "\ufffd" not in found.old
        yield outcome, found
        texts.learn(outcome.encoded, outcome.prefix_len)


Calls = Iterator[Call]
RULES = prose(1, 400)
NUM = 4


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def question(n: int) -> str:
    return f"{n} {prose(100 + n, 120)}"


def turns(count: int) -> list[Message]:
    """So many turns of a user and an assistant."""
    return [each for n in range(count) for each in (user(question(n)), assistant(prose(200 + n, 60)))]


def asked(n: int, *behind: Message, head: str = RULES, message: str = "", answer: str = "") -> Call:
    """Call n of a session that only appends, `behind` its last message a message more."""
    messages = [system(head), *turns(n), user(message or question(n)), *behind]
    return call_of(messages, answer or prose(200 + n, 60), index=n)


def growing(head: Callable[[int], str]) -> Calls:
    """A session whose system prompt changes with every call."""
    for n in range(NUM):
        yield asked(n, head=head(n))


IDS = ["457f9e42-6dad-4440-adc0-523119c215d0", "f5834b7c-290c-4129-ac68-aa2c756b7f5e"] * 2
HEX = ["eb6c6", "36ee5", "acdcf", "24f3b"]


def session_ids() -> Calls:
    for n in range(NUM):
        head = f"Session: {IDS[n]}{n}\nWorkspace: /var/agents/{IDS[n]}{n}\n\n{RULES}"
        yield call_of([system(head), user(prose(n + 50))], session=f"s{n}")


def relative_times() -> Calls:
    for n in range(NUM):
        aged = enumerate(turns(n), start=4 * n)
        stamped = [{**one, "content": f"[{m} minutes ago] {one['content']}"} for m, one in aged]
        yield call_of([system(RULES), *stamped, user("[just now] go")], index=n)


def stripped_stamps() -> Calls:
    for n in range(NUM):
        yield asked(n, message=f"[Sat 2026-06-06 14:0{n} UTC] {prose(100 + n, 120)}")


def documents() -> Calls:
    for n in range(NUM):
        order = [(5 * n + 3 * k) % 8 for k in range(8)]
        listed = "\n\n".join(f"[{at}] {prose(400 + one, 120)}" for at, one in enumerate(order, start=1))
        yield call_of([system(RULES), user(f"{listed}\n\n{prose(n, 20)}")], session=f"q{n}")


def memories() -> Calls:
    for n in range(NUM):
        order = [(3 * n + k) % 8 for k in range(8)]
        listed = "\n".join(f"- [{one}] {prose(500 + one, 40)}" for one in order)
        yield asked(n, head=f"{RULES}\n\n<memory>\n{listed}\n</memory>")


def tools_of(names: list[int], *, reverse: bool = False) -> list[object]:
    found = []
    for one in names:
        parameters = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
        if reverse:
            parameters = dict(reversed(parameters.items()))
        function = {"name": f"tool_{one}", "description": prose(600 + one, 60), "parameters": parameters}
        found.append({"type": "function", "function": function})
    return found


def alternating_tools() -> Calls:
    for n in range(NUM):
        yield call_with(asked(n), tools_of([0, 1, 2, 3] if n % 2 else [2, 0, 3, 1]))


def keys_of_tools() -> Calls:
    for n in range(NUM):
        yield call_with(asked(n), tools_of([0, 1, 2, 3], reverse=bool(n % 2)))


def call_with(call: Call, tools: list[object]) -> Call:
    return Call(**{**{name: getattr(call, name) for name in call.__struct_fields__}, "tools": tools})


def keys_of_results() -> Calls:
    for n in range(NUM):
        rows = {f"k{(k + n) % 5}": prose(700 + (k + n) % 5, 40) for k in range(5)}
        looked = [user("look"), assistant("ok"), user(json.dumps(rows))]
        yield call_of([system(RULES), *looked, *turns(n), user("go")], index=n)


def reminders() -> Calls:
    note = user(f"<reminder>\n{prose(800, 40)}\n</reminder>")
    for n in range(NUM):
        yield asked(n, note)


def sources_in_the_last_message() -> Calls:
    for n in range(NUM):
        sources = f"Use the sources below, and name them. <source>{prose(810, 400)}</source>"
        yield asked(n, message=f"{sources}\n{question(n)}")


def questions_first() -> Calls:
    for n in range(NUM):
        yield call_of([system(RULES), user(f"{prose(820 + n, 20)}\n\n# # #\n\n{prose(990, 500)}")], session=f"q{n}")


def growing_status() -> Calls:
    changed = [f" M src/{prose(830 + k, 3)}.py\n" for k in range(NUM)]
    return growing(lambda n: f"{RULES}\nStatus:\n{''.join(changed[:n])}\n{prose(831)}")


def trimmed_results(stub: str) -> Calls:
    for n in range(NUM):
        history: list[Message] = []
        for k in range(n + 1):
            result = prose(840 + k, 300)
            history += [user(stub if k < n - 1 else result), assistant(prose(850 + k, 60))]
        yield call_of([system(RULES), *history, user("go")], index=n)


def sliding_window() -> Calls:
    for n in range(NUM):
        yield call_of([system(RULES), *turns(n + 4)[2 * n :], user("go")], index=n)


def compaction() -> Calls:
    run = f"run {prose(860, 40)}"
    history = [one for k in range(12) for one in (user(f"{run} {prose(870 + k, 150)}"), assistant(run))]
    yield call_of([system(RULES), *history[:20], user("go")])
    yield call_of([system(RULES), *history[:22], user("go")], index=1)
    yield call_of([system(RULES), user(f"Summary: {prose(880, 200)}"), *history[-4:], user("go")], index=2)


def roles() -> Calls:
    for n in range(NUM):
        before = [one for k in range(n) for one in (user(prose(890 + k)), assistant(prose(200 + k, 60)))]
        yield call_of([system(RULES), *before, system(prose(890 + n))], prose(200 + n, 60), index=n)


def images() -> Calls:
    for n in range(NUM):
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{n}"}}
        parts: list[object] = [shown, {"type": "text", "text": prose(900, 300)}]
        yield call_of([system(RULES), {"role": "user", "content": parts}], session=f"i{n}")


def thoughts_in_a_field() -> Calls:
    """The template shows thoughts behind the last message of the user only."""
    task, thought = user(prose(910)), {**assistant(prose(911, 60)), "reasoning_content": prose(912, 80)}
    done = {"role": "tool", "content": prose(913, 200)}
    yield call_of([system(RULES), task])
    yield call_of([system(RULES), task, thought, done], index=1)
    yield call_of([system(RULES), task, thought, done, assistant("ok"), user("and?")], index=2)


def thoughts_in_the_content() -> Calls:
    for n in range(NUM):
        answer = f"<think>\n{prose(920 + n, 80)}\n</think>\n\n{prose(200 + n, 60)}"
        yield asked(n, answer=answer)


def proxy() -> Calls:
    for n in range(NUM):
        answers = [(prose(200 + k, 30), prose(930 + k, 60)) for k in range(n + 1)]
        before = [one for k in range(n) for one in (user(f"{k}"), assistant("\n\n".join(answers[k])))]
        yield call_of([system(RULES), *before, user(f"{n}")], "\n\n\n".join(answers[n]), index=n)


HEADER = "x-usage: build=2.1.177.{0:.3}; entry=cli; sum={0};"
STATS = "Usage: in={0}9k out={0}k cost=${0}.29\nCache: {0}6% hit, {0}7k cached, {0}84 new\nContext: {0}9k/200k tokens"

PATTERNS: dict[str, tuple[Callable[[], Calls], Cause]] = {
    "billing header": (lambda: growing(lambda n: f"{HEADER.format(HEX[n])}\n{RULES}"), Cause.ID),
    "short tag": (lambda: growing(lambda n: f"tag=a{n}b{n}c;\n{RULES}"), Cause.ID),
    "session id in front": (session_ids, Cause.ID),
    "clock": (lambda: growing(lambda n: f"Now: 2026-06-06 14:0{n}\n{RULES}"), Cause.CLOCK),
    "history stamped anew": (relative_times, Cause.CLOCK),
    "stamps stripped": (stripped_stamps, Cause.CLOCK),
    "counters in a row": (lambda: growing(lambda n: f"{RULES}\n{STATS.format(n + 1)}"), Cause.FIELD),
    "documents in another order": (documents, Cause.REORDERED),
    "memories by score": (memories, Cause.REORDERED),
    "alternating tools": (alternating_tools, Cause.REORDERED),
    "keys of tools": (keys_of_tools, Cause.REORDERED),
    "keys of results": (keys_of_results, Cause.REORDERED),
    "reminders": (reminders, Cause.MOVED),
    "sources in the last message": (sources_in_the_last_message, Cause.MOVED),
    "question first": (questions_first, Cause.FIELD),
    "growing status": (growing_status, Cause.INSERTED),
    "cleared results": (lambda: trimmed_results("[old tool result cleared]"), Cause.REMOVED),
    "sliding window": (sliding_window, Cause.REMOVED),
    "compaction": (compaction, Cause.COMPACTION),
    "roles": (roles, Cause.ANSWER),
    "images": (images, Cause.FIELD),
    "thoughts in a field": (thoughts_in_a_field, Cause.THOUGHT),
    "thoughts in the content": (thoughts_in_the_content, Cause.THOUGHT),
    "proxy": (proxy, Cause.ANSWER),
}  # fmt: skip
