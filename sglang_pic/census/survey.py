"""A census in progress: the files, one after the other, and the counts so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pic_traces.blocks import prefix_census, recognize_blocks
from pic_traces.encode.encoded import Encoder
from pic_traces.session import Session

from sglang_pic.census.inputs import read_sessions
from sglang_pic.census.outcome import Outcome
from sglang_pic.census.simulate import CacheScope, simulate
from sglang_pic.census.tally import Census, Counts, Detail, FileCounts, Tally
from sglang_pic.census.windows import WindowSearch
from sglang_pic.core import CoreConfig

__all__ = ["Survey"]


class Survey:
    """Counts files one after the other; `result` may be called at any time.

    Args:
        files: what `pic_traces.load` takes, and block traces, of which only prefix hits are known; each file once.
        encoder: turns calls into token ids.
        config: the server's settings.
        scope: how long a cache lives.
        limit_sessions: count only the first sessions of every file; None counts all.
        make_search: makes the search for the upper bound, one for every cache; None leaves the bound out.
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
        self._files = list(files)
        self._encoder = encoder
        self._config = config
        self._scope = scope
        self._limit_sessions = limit_sessions
        self._make_search = make_search
        # Filled by `prepare`; block traces are not simulated.
        self._blocks: dict[str, FileCounts] = {}
        self._tallies: dict[str, Tally] = {}
        self._total = Tally()
        self._search: WindowSearch | None = None

    def prepare(self) -> int:
        """Read every file once, so that errors are found before the long work; keep no text.

        Returns:
            How many calls `run` will count.

        Raises:
            TraceError: a file cannot be read, or has no information about reuse.
        """
        num_calls = 0
        for file in self._files:
            if _is_block_trace(file):
                self._blocks[file] = self._count_blocks(file)
            else:
                num_calls += sum(session.num_calls for session in read_sessions(file, self._limit_sessions))
        return num_calls

    def run(self) -> Iterator[Outcome]:
        """Count call by call, and yield each.

        Raises:
            TraceError: a file cannot be read, or the template refuses a call; what was counted before still holds.
        """
        for outcome in simulate(self._sources(), self._encoder, config=self._config, scope=self._scope):
            repeated = None
            if self._search is not None:
                encoded = outcome.encoded
                repeated = self._search.observe(
                    encoded.path, prompt_len=len(encoded.tokens), prefix_len=outcome.stored_len
                )
            self._tallies[outcome.ref.file].add(outcome, repeated)
            self._total.add(outcome, repeated)
            yield outcome

    def result(self) -> Census:
        """The counts so far, without the files that were not begun."""
        files = []
        for file in self._files:
            if file in self._tallies:
                files.append(self._counts(self._tallies[file]).of_file(file))
            elif file in self._blocks:
                files.append(self._blocks[file])
        self._total.is_complete = len(files) == len(self._files) and all(c.detail.is_complete for c in files)
        notes = list(self._encoder.notes)
        if self._blocks:
            notes.append(f"{len(self._blocks)} block trace(s) left out of the sums: only their prefix hits are known")
        note = "; ".join(notes) or None
        return Census(files=files, total=self._counts(self._total, note))

    def _sources(self) -> Iterator[tuple[str, Iterable[Session]]]:
        """The files to simulate; a file is complete when the next one is requested."""
        for file in self._files:
            if file in self._blocks:
                continue
            if self._make_search is not None and (self._search is None or self._scope is CacheScope.FILE):
                self._search = self._make_search()
            tally = self._tallies[file] = Tally()
            yield file, read_sessions(file, self._limit_sessions)
            tally.is_complete = True

    def _count_blocks(self, file: str) -> FileCounts:
        counted = prefix_census(file)
        note = counted.note + ("" if self._limit_sessions is None else "; --limit-sessions does not apply here")
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
