"""Seeded generators of reuse patterns, addressed as `gen:NAME?key=value&...`.

`agent_meta` is the early-divergence workload of Irminsul (arXiv:2605.05696, evaluation): an agent whose prompt begins
with a header that changes with every call, before a body that does not. `random` has nothing to reuse. Must not know
files, servers or locust.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from pic_traces.session import CallSpec, Message, Session
from pic_traces.words import CountTokens, load_token_counter, make_text
from sglang_pic.errors import TraceError

__all__ = ["AgentMeta", "RandomText", "generate"]


class AgentMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:agent_meta`; lengths in tokens.

    Args:
        header: length of the changing header. Irminsul's sweep is 50, 250, 1000, 2000.
        jitter: each header's length is drawn from `header * [1 - jitter, 1 + jitter]`, so that the body moves.
        body: length of the repeated body, the same in every call of every session.
        turn, answer: length of each user message and of each recorded answer; a session's history grows by both.
        calls, sessions: calls of a session, number of sessions.
        seed: the same options give the same text on every machine.
        tokenizer: a folder with tokenizer.json: lengths are then exact for it, not approximate.
    """

    header: int = 250
    jitter: float = 0.1
    body: int = 1500
    turn: int = 40
    answer: int = 40
    calls: int = 20
    sessions: int = 4
    seed: int = 1
    tokenizer: str | None = None


class RandomText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:random`: every call is fresh text of `prompt` tokens, from its first word on."""

    prompt: int = 1000
    answer: int = 16
    calls: int = 1
    sessions: int = 50
    seed: int = 1
    tokenizer: str | None = None


Options = TypeVar("Options", AgentMeta, RandomText)

_LEAST = {"header": 0, "jitter": 0, "body": 0, "turn": 1, "answer": 1, "calls": 1, "sessions": 1, "prompt": 8}


def generate(spec: str) -> Iterator[Session]:
    """Yield the sessions of a generator spec.

    Raises:
        TraceError: the name or an option is unknown, or a value is not allowed.
    """
    name, _, query = spec.removeprefix("gen:").partition("?")
    if name == "agent_meta":
        return _agent_meta(_parse(spec, query, AgentMeta))
    if name == "random":
        return _random_text(_parse(spec, query, RandomText))
    raise TraceError(f"{spec}: no generator {name!r}; agent_meta and random are there")


def _parse(spec: str, query: str, kind: type[Options]) -> Options:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise TraceError(f"{spec}: options are written key=value&key=value ({error})") from error
    keys = [key for key, _ in pairs]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise TraceError(f"{spec}: {', '.join(repeated)} is set twice")
    try:
        options = msgspec.convert(dict(pairs), kind, strict=False)
    except msgspec.ValidationError as error:
        raise TraceError(f"{spec}: {error}; allowed are {', '.join(kind.__struct_fields__)}") from error
    for key, least in _LEAST.items():
        if (value := getattr(options, key, least)) < least:
            raise TraceError(f"{spec}: {key}={value!r}: must be {least} or more")
    if isinstance(options, AgentMeta) and options.jitter > 1:
        raise TraceError(f"{spec}: jitter={options.jitter!r}: must be between 0 and 1")
    return options


def _agent_meta(options: AgentMeta) -> Iterator[Session]:
    count = load_token_counter(options.tokenizer) if options.tokenizer else None
    body = make_text(random.Random(f"body {options.seed}"), options.body, count)
    for number in range(options.sessions):
        rng = random.Random(f"agent_meta {options.seed} {number}")
        spread = round(options.header * options.jitter)
        pool: list[Message] = []
        specs: list[CallSpec] = []
        history: list[tuple[int, int]] = []
        for _ in range(options.calls):
            header = make_text(rng, options.header + rng.randint(-spread, spread), count)
            system: Message = {"role": "system", "content": f"{header}\n\n{body}" if header else body}
            start = len(pool)
            pool += [
                system,
                _message(rng, "user", options.turn, count),
                _message(rng, "assistant", options.answer, count),
            ]
            specs.append(CallSpec(spans=((start, start + 1), *history, (start + 1, start + 2)), completion=start + 2))
            history.append((start + 1, start + 3))
        yield Session(
            session_id=f"agent_meta-{options.seed}-{number:04d}", source="gen:agent_meta", pool=pool, specs=specs
        )


def _random_text(options: RandomText) -> Iterator[Session]:
    count = load_token_counter(options.tokenizer) if options.tokenizer else None
    for number in range(options.sessions):
        rng = random.Random(f"random {options.seed} {number}")
        pool: list[Message] = []
        specs: list[CallSpec] = []
        for _ in range(options.calls):
            start = len(pool)
            # NOTE: with no system message many chat templates put in one of their own, which would be a prefix hit.
            half = options.prompt // 2
            pool += [
                _message(rng, "system", half, count),
                _message(rng, "user", options.prompt - half, count),
                _message(rng, "assistant", options.answer, count),
            ]
            specs.append(CallSpec(spans=((start, start + 2),), completion=start + 2))
        yield Session(session_id=f"random-{options.seed}-{number:04d}", source="gen:random", pool=pool, specs=specs)


def _message(rng: random.Random, role: str, num_tokens: int, count: CountTokens | None) -> Message:
    return {"role": role, "content": make_text(rng, num_tokens, count)}
