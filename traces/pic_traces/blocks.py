"""Serving-level traces: requests as lengths, times and block ids, with no text (README.md beside this file).

Such a trace tells prefix hits at most: a block's id may name the block *with everything before it*, so that equal
content at another position has another id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import msgspec

from pic_traces.errors import TraceError
from pic_traces.lines import Line, read_first_bytes, read_objects
from pic_traces.session import Spans, spans_of

# Tokens a block; Qwen-Bailian's traces have Mooncake's keys and smaller blocks.
_MOONCAKE_BLOCK, _BAILIAN_BLOCK = 512, 16
_PEEK_BYTES = 4096
# A few bytes of a trace can claim any number of blocks; no context that is served has as many.
_MAX_BLOCKS = 1 << 20


class BlockFormat(Enum):
    """The recognised formats: `label` names one in reports, `tells` says what it tells about reuse and why no more."""

    MOONCAKE = (
        "Mooncake",
        "prefix hits only: an id names a block together with everything before it, so text that moved has other ids; "
        "answers are known from the next request on",
    )
    BAILIAN = ("Qwen-Bailian", MOONCAKE[1])
    WEKA = (
        "WEKA",
        "prefix hits within a trace only: ids are local to a trace, so what traces share is unknown; whether an id "
        "names a block or a block with everything before it is not documented, so text that moved cannot be told; "
        "answers are known from the next request on",
    )
    AZURE = ("Azure", "nothing about reuse: it has lengths and times of requests, and neither text nor block ids")

    def __init__(self, label: str, tells: str) -> None:
        self.label = label
        self.tells = tells


class BlockRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a serving trace.

    Args:
        scope: within which block ids mean something: the trace of the request (WEKA), or empty for the file.
        agent: the subagent that made it; None for the main one, or where the format knows none.
        t: seconds since the start of the scope.
        input_len, output_len: lengths in tokens.
        block_size: tokens a block. The last block may be shorter (Mooncake) or missing (WEKA).
        spans: the block ids in order, as half-open ranges.
    """

    scope: str
    agent: str | None
    t: float
    input_len: int
    output_len: int
    block_size: int
    spans: Spans

    @property
    def block_ids(self) -> Iterator[int]:
        """The ids of the prompt's blocks, in order."""
        return chain.from_iterable(range(start, end) for start, end in self.spans)


class BlockCensus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an unlimited prefix cache would have had of a serving trace.

    Args:
        sessions: traces in the file; 0 where the format does not tell sessions apart.
        calls: requests.
        prompt_tokens, prefix_tokens: tokens of all prompts, and those in leading blocks shared with an earlier
            request; the last token of a prompt always counts as computed.
        note: what the figures leave out, and why.
    """

    sessions: int
    calls: int
    prompt_tokens: int
    prefix_tokens: int
    note: str


def recognize_blocks(path: str | Path) -> BlockFormat | None:
    """The format of a serving trace, by the beginning of its content; None for anything else, also for a folder or with
    a reader of the user's.

    Raises:
        TraceError: the file cannot be read.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        return None
    head = read_first_bytes(path, _PEEK_BYTES).lstrip()
    if not head.startswith((b"{", b"[")):
        columns = head.partition(b"\n")[0].strip().split(b",")
        return BlockFormat.AZURE if b"ContextTokens" in columns and b"GeneratedTokens" in columns else None
    # NOTE: a line may be longer than the peek, so the keys are looked for in its beginning instead of being decoded.
    # Quotes inside strings are escaped, so text has no keys.
    keys = set(re.findall(rb'(?<!\\)"(\w+)"\s*:', head))
    if {b"input_length", b"hash_ids"} <= keys:
        return BlockFormat.BAILIAN if b"chat_id" in keys else BlockFormat.MOONCAKE
    if b"requests" in keys and (b"hash_id_scope" in keys or b"block_size" in keys):
        return BlockFormat.WEKA
    return None


def read_blocks(path: str | Path) -> Iterator[BlockRequest]:
    """Yield the requests of a serving trace, scope by scope, in each by time.

    Raises:
        TraceError: the file is no serving trace, has no block ids (Azure), or a request is not what it should be.
    """
    path = Path(path).expanduser()
    kind = recognize_blocks(path)
    if kind is None:
        raise TraceError(f"{path}: no serving trace; Mooncake's, WEKA's and Azure's formats are recognised")
    if kind is BlockFormat.AZURE:
        raise TraceError(f"{path}: an {kind.label} trace says {kind.tells}; use Mooncake's or WEKA's, or request logs")
    if kind is BlockFormat.WEKA:
        return _read_weka(path)
    return _read_mooncake(path, _MOONCAKE_BLOCK if kind is BlockFormat.MOONCAKE else _BAILIAN_BLOCK)


def prefix_census(path: str | Path) -> BlockCensus:
    """Count the prefix hits of a serving trace against an unlimited cache of its own earlier requests.

    A hit is a leading run of blocks with which an earlier request of the same scope began too. O(blocks) time, and
    memory for the distinct prefixes of one scope.

    Raises:
        TraceError: as `read_blocks`.
    """
    calls = prompt_tokens = prefix_tokens = 0
    scopes = set[str]()
    root: _Node = {}
    scope = ""
    for request in read_blocks(path):
        if request.scope != scope:
            root, scope = {}, request.scope
        scopes.add(request.scope)
        calls += 1
        prompt_tokens += request.input_len
        num_known = _insert(root, request.block_ids)
        prefix_tokens += min(num_known * request.block_size, max(request.input_len - 1, 0))
    kind = recognize_blocks(path)
    assert kind is not None, "read_blocks refuses what is not recognised"
    return BlockCensus(
        sessions=len(scopes - {""}),
        calls=calls,
        prompt_tokens=prompt_tokens,
        prefix_tokens=prefix_tokens,
        note=kind.tells,
    )


_Node: TypeAlias = "dict[int, _Node]"  # a prefix of earlier requests: from an id to what followed it


def _insert(node: _Node, ids: Iterator[int]) -> int:
    """Add a request's blocks below the root; returns how many leading ones were there."""
    num_known = 0
    for block in ids:
        child = node.get(block)
        if child is None:
            node[block] = node = {}
            break
        node = child
        num_known += 1
    for block in ids:
        node[block] = node = {}
    return num_known


# NOTE: unknown keys are let through in what others write.
class _MooncakeRequest(msgspec.Struct, frozen=True, kw_only=True):
    # AIPerf's have `delay` in its place from a session's second request on.
    timestamp: float | None = None
    delay: float = 0.0
    session_id: str = ""
    input_length: int
    output_length: int
    hash_ids: list[int]


class _WekaRequest(msgspec.Struct, frozen=True, kw_only=True):
    t: float = 0.0
    input_len: int | None = msgspec.field(default=None, name="in")
    out: int = 0
    hash_ids: list[int] | None = None
    hash_ranges: list[tuple[int, int]] | None = None
    agent_id: str | None = None
    requests: list[_WekaRequest] | None = None


class _WekaTrace(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    block_size: int
    requests: list[_WekaRequest]


def _read_mooncake(path: Path, block_size: int) -> Iterator[BlockRequest]:
    ended: dict[str, float] = {}
    for line in read_objects(path):
        record = line.convert(_MooncakeRequest, "Mooncake request")
        _check_len(line, record.input_length, len(record.hash_ids), block_size)
        at = ended.get(record.session_id, 0.0) + record.delay if record.timestamp is None else record.timestamp
        ended[record.session_id] = at
        yield BlockRequest(
            scope="",
            agent=None,
            t=at / 1000,
            input_len=record.input_length,
            output_len=record.output_length,
            block_size=block_size,
            spans=spans_of(record.hash_ids),
        )


def _read_weka(path: Path) -> Iterator[BlockRequest]:
    for line in read_objects(path):
        trace = line.convert(_WekaTrace, "WEKA trace")
        if trace.block_size < 1:
            raise line.error(f"block_size={trace.block_size!r}: must be 1 or more")
        requests = list(_flatten_weka(line, trace, trace.requests, None, 0.0))
        # A subagent is nested where it was started, and runs beside what follows there.
        requests.sort(key=lambda request: request.t)
        yield from requests


def _flatten_weka(
    line: Line, trace: _WekaTrace, requests: list[_WekaRequest], agent: str | None, begin: float
) -> Iterator[BlockRequest]:
    for number, request in enumerate(requests):
        if request.requests is not None:
            # A subagent's times count from its own start.
            yield from _flatten_weka(line, trace, request.requests, request.agent_id or "subagent", begin + request.t)
            continue
        if request.input_len is None or (request.hash_ids is None and request.hash_ranges is None):
            raise line.error(f"requests[{number}] lacks `in`, or both `hash_ranges` and `hash_ids`")
        spans = tuple(request.hash_ranges) if request.hash_ranges is not None else spans_of(request.hash_ids or [])
        if bad := [span for span in spans if not 0 <= span[0] <= span[1]]:
            raise line.error(f"requests[{number}] has the range {list(bad[0])}; half-open [start, end) is allowed")
        _check_len(line, request.input_len, sum(end - start for start, end in spans), trace.block_size)
        yield BlockRequest(
            scope=trace.id,
            agent=agent,
            t=begin + request.t,
            input_len=request.input_len,
            output_len=request.out,
            block_size=trace.block_size,
            spans=spans,
        )


def _check_len(line: Line, input_len: int, num_blocks: int, block_size: int) -> None:
    """Refuses ids of another block size: hits would be counted in wrong units."""
    if num_blocks > _MAX_BLOCKS:
        raise line.error(f"a prompt of {num_blocks} blocks; at most {_MAX_BLOCKS} are read")
    if input_len < 0 or abs(num_blocks * block_size - input_len) >= block_size:
        raise line.error(f"{num_blocks} blocks of {block_size} tokens do not fit a prompt of {input_len} tokens")
