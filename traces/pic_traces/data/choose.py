"""Chooses the sessions of `sample:agents` from recorded ones, by the numbers of their calls and tokens alone.

The rule is in README.md beside this file. One file of recorded sessions for every project:
`python traces/pic_traces/data/choose.py TOKENIZER_FOLDER OUT.jsonl.gz FILE...`
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import msgspec

from pic_traces.encode import Encoder, load_encoder
from pic_traces.formats.recorded import parse_recorded
from pic_traces.lines import Line, read_objects
from pic_traces.session import JsonValue

MAX_PROMPT_TOKENS = 4_500
"""A session is taken up to its first longer prompt."""
MIN_CALLS, MAX_SESSION_TOKENS = 8, 40_000
"""What must be left of a session, and how many prompt tokens all of its calls may have together."""

_KEPT = ("session_id", "source", "license", "tools")


def choose(path: Path, encoder: Encoder) -> dict[str, JsonValue]:
    """The record of the session with the most calls; of several, with the fewest tokens; of several, the first."""
    found = [(len(lengths), -sum(lengths), line) for line in read_objects(path) if (lengths := _lengths(line, encoder))]
    num_calls, _, line = max(found, key=lambda entry: entry[:2])
    session = parse_recorded(line)
    used = max(max((spec.completion or 0) + 1, *(end for _, end in spec.spans)) for spec in session.specs[:num_calls])
    record: dict[str, JsonValue] = {key: line.value[key] for key in _KEPT if key in line.value}
    record["messages"] = [*session.pool[:used]]
    for key in ("turns", "prompts"):
        if isinstance(per_call := line.value.get(key), list):
            record[key] = per_call[:num_calls]
    return record


def _lengths(line: Line, encoder: Encoder) -> list[int]:
    """The lengths of the prompts that are taken; empty where the session is within no limits."""
    lengths: list[int] = []
    for call in parse_recorded(line).calls():
        num_tokens = len(encoder.encode(call).tokens)
        if num_tokens > MAX_PROMPT_TOKENS:
            break
        lengths.append(num_tokens)
    return lengths if len(lengths) >= MIN_CALLS and sum(lengths) <= MAX_SESSION_TOKENS else []


if __name__ == "__main__":
    tokenizer, out, *files = sys.argv[1:]
    records = [choose(Path(file), load_encoder(tokenizer)) for file in files]
    Path(out).write_bytes(
        gzip.compress(b"".join(msgspec.json.encode(record) + b"\n" for record in records), 9, mtime=0)
    )
