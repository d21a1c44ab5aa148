"""A census under way: which files are counted, how far, and what is known so far.

Owns the order of files and the tallies. Must not know arguments, progress bars or tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from pic_traces import load
from pic_traces.blocks import prefix_census, recognize_blocks
from pic_traces.encode.encoded import Encoder
from pic_traces.session import Session

from sglang_pic.census.simulate import CacheScope, simulate
from sglang_pic.census.tally import Census, Counts, Detail, FileCounts, Tally
from sglang_pic.census.windows import WindowSearch
from sglang_pic.core import CoreConfig
from sglang_pic.errors import ConfigError

__all__ = ["Survey"]


class Survey:
    """Counts files one after the other; `result` may be asked at any time.

    Args:
        files: what `pic_traces.load` takes, and block traces, which tell prefix hits at most; each once.
        encoder: turns calls into token ids.
        config: the server's settings.
        scope: how long a cache lives.
        limit_sessions: counts the first sessions of every file only; None counts all.
        make_search: makes the search that the upper bound is taken from, one for every cache; None leaves it out.

    Raises:
        ConfigError: a file is named twice.
    """

    def __init__(
        self,
        files: Sequence[str],
        *,
        encoder: Encoder,
        config: CoreConfig,
        scope: CacheScope = CacheScope.FILE,
        limit_sessions: int | None = None,
        make_search: Callable[[], WindowSearch] | None = None,
    ) -> None:
        for file in files:
            if files.count(file) > 1:
                raise ConfigError(f"FILE={file!r}: is named twice; a file is counted once, in a row of its own.")
        self._files = list(files)
        self._encoder = encoder
        self._config = config
        self._scope = scope
        self._limit_sessions = limit_sessions
        self._make_search = make_search
        # Filled by `prepare`: block traces have nothing to simulate.
        self._blocks: dict[str, FileCounts] = {}
        self._tallies: dict[str, Tally] = {}
        self._search: WindowSearch | None = None

    def prepare(self) -> int:
        """Read every file once, so that what is wrong is found before the long work; keeps no text.

        Returns:
            How many calls `run` will count.

        Raises:
            TraceError: a file cannot be read, or tells nothing about reuse.
        """
        num_calls = 0
        for file in self._files:
            if _is_block_trace(file):
                self._blocks[file] = self._count_blocks(file)
            else:
                num_calls += sum(session.num_calls for session in self._sessions(file))
        return num_calls

    def run(self) -> Iterator[str]:
        """Count call by call; yields the file of each.

        Raises:
            TraceError: a file cannot be read, or the template refuses a call; what was counted before still holds.
        """
        for outcome in simulate(self._sources(), self._encoder, config=self._config, scope=self._scope):
            self._tallies[outcome.ref.file].add(outcome)
            yield outcome.ref.file

    def result(self) -> Census:
        """The counts as they stand; files that were not begun are left out."""
        total = Tally(search=self._search)
        total.is_complete = True
        files = []
        for file in self._files:
            tally = self._tallies.get(file)
            total.is_complete &= tally.is_complete if tally is not None else file in self._blocks
            if tally is not None:
                total.merge(tally)
                files.append(self._counts(tally).of_file(file))
            elif file in self._blocks:
                files.append(self._blocks[file])
        notes = list(self._encoder.notes)
        if self._blocks:
            notes.append(f"{len(self._blocks)} block trace(s) left out of the sums: they tell prefix hits only")
        note = "; ".join(notes) or None
        return Census(files=files, total=self._counts(total, note))

    def _sources(self) -> Iterator[tuple[str, Iterable[Session]]]:
        """What is simulated; a file has ended when the next one is asked for."""
        for file in self._files:
            if file in self._blocks:
                continue
            if self._make_search is not None and (self._search is None or self._scope is CacheScope.FILE):
                self._search = self._make_search()
            tally = self._tallies[file] = Tally(search=self._search)
            yield file, self._sessions(file)
            tally.is_complete = True

    def _sessions(self, file: str) -> Iterator[Session]:
        return islice(load(file), self._limit_sessions)

    def _count_blocks(self, file: str) -> FileCounts:
        counted = prefix_census(file)
        note = (
            counted.note if self._limit_sessions is None else f"{counted.note}; all of it was counted, without a limit"
        )
        counts = Counts(
            sessions=counted.sessions,
            calls=counted.calls,
            prompt_tokens=counted.prompt_tokens,
            prefix_tokens=counted.prefix_tokens,
            chunk_tokens=None,
            new_tokens=None,
            runs=None,
            detail=Detail(note=note),
        )
        return counts.of_file(file)

    def _counts(self, tally: Tally, note: str | None = None) -> Counts:
        encoder = self._encoder
        return tally.counts(tokenizer=encoder.name, tokenizer_exact=encoder.is_exact, note=note)


def _is_block_trace(file: str) -> bool:
    return not file.startswith(("gen:", "sample:")) and recognize_blocks(file) is not None
