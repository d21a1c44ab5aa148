"""`clock:TRACE`: the sessions of another trace with a clock in front of every system prompt.

The clock's line differs in every call of a session, so a prefix cache misses everything behind the line. The rest of a
prompt is unchanged, including messages that quote earlier prompts.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

import msgspec

from pic_traces.session import CallSpec, JsonValue, Message, Session

_SPEC = re.compile(r"(clock:(?:(\d+)@)?)(.*)", re.DOTALL)
_FIRST_DAY, _YEAR_S = datetime(2026, 1, 1), 365 * 86_400
# Between two calls of a session, in seconds: an agent that runs a tool, reads, or waits for its user.
_GAPS = (2, 60)


def split_clock(trace: str) -> tuple[str, int, str]:
    """Split a `clock:` spec into its prefix, its seed and the trace; the prefix is empty if there is no clock.

    `clock:TRACE` has seed 1, `clock:SEED@TRACE` another one.
    """
    match = _SPEC.match(trace)
    if match is None:
        return "", 0, trace
    part, seed, rest = match.groups()
    return part, int(seed or 1), rest


def set_clocks(sessions: Iterable[Session], seed: int) -> Iterator[Session]:
    """Yield the sessions with a clock in front of every prompt.

    A session's clock depends on `seed` and the session's id alone. It starts in 2026 and goes on by 2 to 60 seconds
    from call to call.
    """
    for session in sessions:
        rng = random.Random(f"clock {seed} {session.session_id}")
        time = _FIRST_DAY + timedelta(seconds=rng.randrange(_YEAR_S))
        pool, specs = list(session.pool), []
        for spec in session.specs:
            specs.append(_with_clock(spec, pool, f"Current time: {time:%Y-%m-%d %H:%M:%S (%A)}."))
            time += timedelta(seconds=round(math.exp(rng.uniform(*map(math.log, _GAPS)))))
        yield msgspec.structs.replace(session, pool=pool, specs=specs)


def _with_clock(spec: CallSpec, pool: list[Message], line: str) -> CallSpec:
    """The call with `line` in front of its system message, or as the system message where there is none."""
    (start, end), *others = [span for span in spec.spans if span[0] < span[1]]
    first = pool[start]
    at = len(pool)
    if first["role"] in ("system", "developer"):
        pool.append({**first, "content": _in_front(line, first.get("content"))})
        start += 1
    else:
        pool.append({"role": "system", "content": line})
    spans = [(at, at + 1), (start, end), *others]
    return msgspec.structs.replace(spec, spans=tuple(span for span in spans if span[0] < span[1]))


def _in_front(line: str, content: JsonValue) -> JsonValue:
    if isinstance(content, list):
        return [{"type": "text", "text": f"{line}\n\n"}, *content]
    return f"{line}\n\n{content}" if content else line
