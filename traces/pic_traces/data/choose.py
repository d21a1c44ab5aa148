"""Chooses the sessions of `sample:agents` from recorded ones, by the numbers of their calls and tokens alone.

The rule is in README.md beside this file. One file of recorded sessions for every project:
`python traces/pic_traces/data/choose.py FILE... --tokenizer DIR --out agents_sample.jsonl.gz`
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import msgspec

from pic_traces.encode import Encoder, load_encoder
from pic_traces.lines import Line, read_objects
from pic_traces.recorded import parse_recorded
from pic_traces.session import JsonValue

MAX_PROMPT_TOKENS = 4_500
"""A session is taken up to its first longer prompt."""
MIN_CALLS, MAX_SESSION_TOKENS = 8, 40_000
"""What must be left of a session, and how many prompt tokens all of its calls may have together."""

_KEPT = ("session_id", "source", "license", "tools")


def main() -> None:
    """Write the chosen session of every file, in the files' order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded sessions of one project")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="a model's tokenizer and chat template")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the sample to write")
    args = parser.parse_args()
    encoder = load_encoder(args.tokenizer)
    chosen = [choose(path, encoder) for path in args.files]
    args.out.write_bytes(gzip.compress(b"".join(msgspec.json.encode(record) + b"\n" for record in chosen), 9, mtime=0))


def choose(path: Path, encoder: Encoder) -> dict[str, JsonValue]:
    """The session with the most calls, of several the one with the fewest tokens, of several the first."""
    found = []
    for line in read_objects(path):
        lengths = prompt_lengths(line, encoder)
        if len(lengths) >= MIN_CALLS and sum(lengths) <= MAX_SESSION_TOKENS:
            found.append((-len(lengths), sum(lengths), line))
    if not found:
        raise SystemExit(f"{path}: no session has {MIN_CALLS} calls within the limits")
    num_calls, num_tokens, line = min(found, key=lambda entry: entry[:2])
    print(f"{line.value['session_id']}: {-num_calls} calls, {num_tokens} tokens, one of {len(found)} within the limits")
    return cut(line, -num_calls)


def prompt_lengths(line: Line, encoder: Encoder) -> list[int]:
    """The lengths of a session's prompts up to the first that is too long."""
    lengths: list[int] = []
    for call in parse_recorded(line).calls():
        num_tokens = len(encoder.encode(call).tokens)
        if num_tokens > MAX_PROMPT_TOKENS:
            break
        lengths.append(num_tokens)
    return lengths


def cut(line: Line, num_calls: int) -> dict[str, JsonValue]:
    """The record of a session's first calls, with the messages that they need."""
    session = parse_recorded(line)
    specs = session.specs[:num_calls]
    used = max([end for spec in specs for _, end in spec.spans] + [(spec.completion or 0) + 1 for spec in specs])
    kept: dict[str, JsonValue] = {key: line.value[key] for key in _KEPT if key in line.value}
    per_call = {key: value for key in ("turns", "prompts") if isinstance(value := line.value.get(key), list)}
    return {**kept, "messages": [*session.pool[:used]], **{key: value[:num_calls] for key, value in per_call.items()}}


if __name__ == "__main__":
    main()
