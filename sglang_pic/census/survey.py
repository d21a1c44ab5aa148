"""A census in progress: the files, one after the other, and the counts so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from pic_traces.custom import CustomReader
from pic_traces.encode.encoded import Encoder
from pic_traces.logs import Passed
from pic_traces.session import Session

from sglang_pic.census.inputs import read_sessions
from sglang_pic.census.outcome import Outcome
from sglang_pic.census.pools import PoolCensus
from sglang_pic.census.simulate import CacheScope, simulate
from sglang_pic.census.states import StateRules, StateTree
from sglang_pic.census.tally import Census, FileCounts, Tally
from sglang_pic.census.windows import WindowSearch
from sglang_pic.core import CoreConfig


@dataclass(slots=True)
class Survey:
    """Counts files one after the other; `result` may be called at any time.

    Args:
        files: inputs of `pic_traces.load`, each once.
        encoder: turns calls into token ids.
        config: the server's settings.
        scope: how long a cache lives.
        limit_sessions: count only the first sessions of every file; None counts all.
        make_search: makes the search for the upper bound, once per cache; None for no upper bound.
        is_strict: refuse lines of no known format.
        reader: reads the files; without one their formats are recognised.
        states: rules for a hybrid model's states, to count its hits too; None for other models.
        side_by_side: sessions of a file that take turns.
        pool: tokens of a KV pool, to count the hits by pool size too; None to leave them out.
    """

    files: Sequence[str]
    encoder: Encoder
    config: CoreConfig
    scope: CacheScope = CacheScope.FILE
    limit_sessions: int | None = None
    make_search: Callable[[], WindowSearch] | None = None
    is_strict: bool = False
    reader: CustomReader | None = None
    states: StateRules | None = None
    side_by_side: int = 1
    pool: int | None = None
    # Filled by `prepare`.
    _passed: dict[str, Passed] = field(default_factory=dict)
    _tallies: dict[str, Tally] = field(default_factory=dict)
    _total: Tally = field(default_factory=Tally)
    _search: WindowSearch | None = None
    _trees: Mapping[str, StateTree] = field(default_factory=dict)
    """Of a hybrid model's server, with SGLang's states and with checkpoints, by the names of `HybridCounts`."""
    _pools: PoolCensus | None = None

    def __post_init__(self) -> None:
        if self.pool is not None:
            self._pools = PoolCensus(self.pool, self.config, self.encoder, self.side_by_side)

    def prepare(self) -> int:
        """Read every file once to find errors before the long work; no text is kept.

        Returns:
            How many calls `run` will count.

        Raises:
            TraceError: a file cannot be read, or contains nothing that could be reused.
        """
        num_calls = 0
        for file in self.files:
            passed = self._passed[file] = Passed(self.is_strict)
            sessions = read_sessions(file, self.limit_sessions, passed, self.reader)
            num_calls += sum(session.num_calls for session in sessions)
        return num_calls

    def run(self) -> Iterator[Outcome]:
        """Count call by call, and yield each.

        Raises:
            TraceError: a file cannot be read, or the template refuses every call; earlier counts stay valid.
        """
        outcomes = simulate(
            self._sources(),
            self.encoder,
            config=self.config,
            scope=self.scope,
            side_by_side=self.side_by_side,
            passed=self._passed or None,
        )
        for outcome in outcomes:
            path, prompt_len, repeated = outcome.encoded.path, len(outcome.encoded.tokens), None
            if self._search is not None:
                repeated = self._search.observe(path, prompt_len=prompt_len, prefix_len=outcome.stored_len)
            hybrid = {name: tree.serve(path, prompt_len).state_len for name, tree in self._trees.items()}
            if self._pools is not None:
                self._pools.observe(outcome)
            self._tallies[outcome.ref.file].add(outcome, repeated, hybrid)
            self._total.add(outcome, repeated, hybrid)
            yield outcome

    def result(self) -> Census:
        """The counts so far, of the files that were started."""
        counted = [(file, tally.counts(self.encoder, self._note(file))) for file, tally in self._tallies.items()]
        files = [FileCounts(file=file, **msgspec.structs.asdict(counts)) for file, counts in counted]
        self._total.is_complete = len(files) == len(self.files) and all(c.detail.is_complete for c in files)
        total = self._total.counts(self.encoder, "; ".join(self.encoder.notes) or None)
        pools = None if self._pools is None else self._pools.result()
        return Census(files=files, total=total, pools=pools)

    def _note(self, file: str) -> str | None:
        """A note for the report on how a file was read."""
        passed, tally = self._passed.get(file), self._tallies[file]
        notes = [tally.difference(is_exact=self.encoder.is_exact)]
        if passed is not None:
            notes = [passed.summary(), *notes, *passed.notes]
        return "; ".join(filter(None, notes)) or None

    def _sources(self) -> Iterator[tuple[str, Iterable[Session]]]:
        """The files to simulate; a file is complete when the next one is requested."""
        for file in self.files:
            if self.make_search is not None and (self._search is None or self.scope is CacheScope.FILE):
                self._search = self.make_search()
            if self.states is not None and (not self._trees or self.scope is CacheScope.FILE):
                placed = StateTree(self.states, chooses=True)
                self._trees = {"state_tokens": StateTree(self.states), "placed_tokens": placed}
            if self._pools is not None and self.scope is CacheScope.FILE:
                self._pools.begin_cache()
            tally = self._tallies[file] = Tally()
            yield file, read_sessions(file, self.limit_sessions, reader=self.reader)
            tally.is_complete = True
