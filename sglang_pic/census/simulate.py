"""Serves recorded calls from a cache as the server would: match the prefix, plan, publish; without a cost gate.

`simulate` serves a session's calls in order, sessions one after the other or in turns, and evicts nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

import msgspec
from pic_traces.encode.encoded import EncodedCall, Encoder
from pic_traces.errors import LineError
from pic_traces.logs import Passed
from pic_traces.session import Call, Session

from sglang_pic.census.changes import changed_fields
from sglang_pic.census.outcome import CallRef, Outcome, RunSpan
from sglang_pic.census.prefix_tree import PrefixTree
from sglang_pic.config import PicConfig
from sglang_pic.core import (
    MESSAGE_BREAK,
    ContentIndex,
    CoreConfig,
    DropReason,
    Exactness,
    Lexicon,
    Path,
    PlanOptions,
    RowSource,
    Run,
    Span,
    Tokens,
    rows_of_request,
)

NAMESPACE = "census"
"""Of all calls."""
_UNLIMITED = 1 << 40


class CacheScope(Enum):
    """How long a cache lives."""

    FILE = "file"
    """Every file begins with an empty one."""
    ALL = "all"
    """One cache sees all files, in their order."""


def simulate(
    files: Iterable[tuple[str, Iterable[Session]]],
    encoder: Encoder,
    *,
    config: CoreConfig | None = None,
    scope: CacheScope = CacheScope.FILE,
    side_by_side: int = 1,
    passed: Mapping[str, Passed] | None = None,
) -> Iterator[Outcome]:
    """Serve every call, and yield its outcome, in order.

    Args:
        files: names with their sessions; each file is read when the one before has ended.
        encoder: turns calls into token ids.
        config: the server's settings; its bounds on the index do not apply here.
        scope: how long a cache lives.
        side_by_side: sessions of a file that take turns.
        passed: notes by file the calls that the template refuses, as a server would.

    Raises:
        TraceError: a file cannot be read, or the template refuses every call, or one without `passed`; earlier
            outcomes stay valid.

    Memory grows with distinct tokens, not with prompt tokens.
    """
    numbers = itertools.count()
    cache: Cache | None = None
    refused, is_served = None, False
    for file, sessions in files:
        if cache is None or scope is CacheScope.FILE:
            cache = Cache(config or CoreConfig(), encoder)
        for call in in_turns(sessions, side_by_side):
            ref = CallRef(next(numbers), file, call.session_id, call.index)
            try:
                encoded = encoder.encode(call)
            except LineError as error:
                if passed is None:
                    raise
                passed[file].add(error)
                refused = error
                continue
            outcome = cache.serve(ref, call.agent, encoded)
            is_served = True
            yield replace(outcome, recorded_len=call.prompt_tokens) if call.prompt_tokens else outcome
    if refused is not None and not is_served:
        raise refused


def in_turns(sessions: Iterable[Session], side_by_side: int) -> Iterator[Call]:
    """All calls, one of each of so many sessions in turn; where a session ends the next one begins.

    A replay with as many `--sessions` makes them in this order if all calls take equally long.
    """
    waiting = iter(sessions)
    running = deque(session.calls() for session in itertools.islice(waiting, side_by_side))
    while running:
        calls = running.popleft()
        call = next(calls, None)
        if call is not None:
            yield call
            running.append(calls)
        elif (session := next(waiting, None)) is not None:
            running.appendleft(session.calls())


class Cache:
    """The exact prefixes and the chunks of all calls so far, or those in a KV pool.

    Args:
        config: the server's settings; its bounds on the index apply to a pool only.
        encoder: made the calls' tokens.
        pool: tokens of the KV pool; without it nothing is evicted.
    """

    def __init__(self, config: CoreConfig, encoder: Encoder, pool: int | None = None) -> None:
        server = PicConfig()
        options = PlanOptions(max_gaps=server.max_gaps, max_runs=server.max_runs)
        if pool is None:
            config = msgspec.structs.replace(config, max_index_tokens=_UNLIMITED, max_index_bytes=_UNLIMITED)
        self.encoder = encoder
        self._lexicon = Lexicon()
        self.index = ContentIndex(config, lexicon=self._lexicon)
        self.prefixes = PrefixTree(pool)
        rows = RowSource() if pool is None else _RowsInPool(self.prefixes)
        self._plan = partial(self.index.plan, NAMESPACE, rows=rows, options=options)
        self._refs: dict[int, CallRef] = {}

    def serve(self, ref: CallRef, agent: str | None, encoded: EncodedCall) -> Outcome:
        """Serve one call."""
        tokens, path = encoded.tokens, encoded.path
        self._refs[ref.number] = ref
        self.learn()
        match = self.prefixes.match(tokens)
        prefix = self.index.exactness(NAMESPACE, tokens[: match.prefix_len])
        plan = self._plan(tokens, prefix_len=match.prefix_len)
        served = (match.prefix_len, *(run.target_end for run in plan.runs))
        runs = tuple(self._span(run, end) for run, end in zip(plan.runs, served, strict=False))
        # What a second pass computes is no donor: it was computed after spliced text.
        last = {run.target_start for run in plan.after_second_pass().runs}
        generations = [(run.target_start, run.generation) for run in plan.runs]
        self.keep(path, ref.number, match.prefix_len, prefix, [run[:2] for run in runs], generations)
        return Outcome(
            ref=ref,
            agent=agent,
            encoded=encoded,
            prefix_len=match.prefix_len,
            num_inherited=prefix.approximate_len,
            runs=tuple(span for span, run in zip(runs, plan.runs, strict=True) if run.target_start in last),
            neighbor=None if match.neighbor is None else self._refs[match.neighbor],
            expected=match.expected,
            changed_fields=changed_fields(plan, tokens, match.expected),
            guarded=plan.guarded,
            is_aged=DropReason.GENERATION in plan.dropped,
        )

    def keep(
        self,
        path: Tokens,
        number: int,
        matched_len: int,
        prefix: Exactness,
        spliced: Sequence[Span] = (),
        generations: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Keep the rows of a call; the arguments but for its number are those of `rows_of_request`."""
        stored = self.prefixes.insert(path, number)
        rows = rows_of_request(
            len(path), stored, matched_len=matched_len, prefix=prefix, spliced=spliced, generations=generations
        )
        if rows is not None:
            self.index.note(NAMESPACE, path, rows, self.encoder.delimiters)

    def learn(self) -> None:
        """Add the encoder's new tokens to the lexicon; delimiters of messages end a line."""
        texts, delimiters = self.encoder.texts, self.encoder.delimiters
        known = len(self._lexicon)
        self._lexicon.extend(
            MESSAGE_BREAK if token in delimiters else texts[token] for token in range(known, len(texts))
        )

    def _span(self, run: Run, served: int) -> RunSpan:
        """A run; the tokens between `served` and its start are computed."""
        donor = self.prefixes.appender(run.donor.tokens(run.donor_end), run.donor_start)
        # Where the guard cut a run, less than a seam may be computed.
        seam_len = min(run.seam_len, run.target_start - served)
        return RunSpan(run.target_start, run.target_end, run.shift, seam_len, self._refs[donor], run.context)


class _RowsInPool(RowSource):
    """The rows that a pool still has; what is asked for is touched."""

    def __init__(self, prefixes: PrefixTree) -> None:
        super().__init__()
        self._prefixes = prefixes

    def num_resident(self, path: Path, end: int) -> int:
        return self._prefixes.num_resident(path.tokens(end))
