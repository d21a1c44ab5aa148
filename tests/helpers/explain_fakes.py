"""Calls written by hand for tests of `explain`, and what the census makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from pic_traces.encode import load_encoder
from pic_traces.session import Call, Message

from sglang_pic.census.outcome import CallRef, Outcome
from sglang_pic.census.simulate import Cache
from sglang_pic.core import MOST_REUSE, CoreConfig
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
