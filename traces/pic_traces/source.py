"""Where sessions come from: a trace file, a packaged sample, or a seeded generator.

Owns `load` and the recognition of formats. Must not know any one format's keys, servers or locust.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import msgspec

from pic_traces.generate import generate
from pic_traces.lines import Line, read_lines
from pic_traces.openai_log import is_request, parse_requests
from pic_traces.recorded import is_recorded, parse_recorded
from pic_traces.session import Session
from sglang_pic.errors import TraceError

__all__ = ["SAMPLES", "limit", "load"]

_DATA = Path(__file__).parent / "data"
SAMPLES: dict[str, Path] = {"opendevin": _DATA / "opendevin_sample.jsonl.gz"}
"""The traces that travel with the package, by the name in `sample:NAME`."""


def load(trace: str | Path) -> Iterator[Session]:
    """Yield the sessions of a trace, in its order.

    Args:
        trace: a file (JSONL, gzip or plain: recorded sessions or OpenAI chat requests, told apart by content),
            `sample:NAME`, or `gen:NAME?key=value&...`.

    Raises:
        TraceError: at the first thing that cannot be read; the message names the file and the line.
    """
    name = str(trace)
    if name.startswith("gen:"):
        return generate(name)
    if name.startswith("sample:"):
        sample = name.removeprefix("sample:")
        if sample not in SAMPLES:
            raise TraceError(
                f"{name}: no such sample; {', '.join(f'sample:{key}' for key in sorted(SAMPLES))} is there"
            )
        return _load_file(SAMPLES[sample])
    path = Path(trace).expanduser()
    if not path.is_file():
        raise TraceError(f"{name}: no such file; a path, sample:NAME or gen:NAME?key=value&... is allowed")
    return _load_file(path)


def limit(
    sessions: Iterator[Session], *, num_sessions: int | None = None, num_calls: int | None = None
) -> list[Session]:
    """The first `num_sessions` sessions, cut after `num_calls` calls in all; None means no limit."""
    result: list[Session] = []
    left = num_calls
    for session in islice(sessions, num_sessions):
        if left is not None:
            if left == 0:
                break
            kept = session.specs[:left]
            left -= len(kept)
            result.append(msgspec.structs.replace(session, specs=kept))
        else:
            result.append(session)
    return result


def _load_file(path: Path) -> Iterator[Session]:
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: no sessions: the file has no lines")
    everything = chain([first], lines)
    if is_recorded(first.value):
        return (parse_recorded(line) for line in everything)
    if is_request(first.value):
        return parse_requests(map(_expect_request, everything), path.name)
    raise first.error(
        f"unknown trace format: the line has the keys {', '.join(sorted(first.value)) or '(none)'}; "
        "expected `messages` and `turns` (a recorded session) or `messages` (an OpenAI chat request)"
    )


def _expect_request(line: Line) -> Line:
    if not is_request(line.value):
        raise line.error(f"no chat request: no `messages` among the keys {', '.join(sorted(line.value)) or '(none)'}")
    return line
