"""The cases of a run with their arms, in the order they are measured.

Owns which arms and extras every experiment gets. Prompts come round robin over the cells, so that an interrupted run
has as many of each. It must not know servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from pic_bench.fidelity.arms import CONTROLS, SHIPPED, Arm, spliced_arms
from pic_bench.fidelity.case import Case
from pic_bench.fidelity.config import Sizes
from pic_bench.fidelity.grid import FrameText, filler_len, grid_case, make_filler, shift_case
from pic_bench.fidelity.measure import Wants
from pic_bench.fidelity.qa import QaFrames, answer_ids, qa_case
from pic_bench.fidelity.questions import Question
from pic_bench.fidelity.record import Donors, Experiment
from pic_bench.fidelity.texts import TextPool
from pic_bench.fidelity.tokens import ModelText
from sglang_pic.errors import ConfigError

__all__ = ["QA_MIN_SPLICED", "Job", "PassageJobs", "qa_jobs"]

QA_MIN_SPLICED = 44
"""More than the key that leads to an answer, less than the longest seam leaves of the shortest block."""
LONG_SEAM = 32
"""Of the arm of QA that splices every document: as long as the default's."""
_GREEDY_ARMS = frozenset({"full", "retest", "exact", "naive", "seam-0", "seam-1", "seam-8"})
_REQUEST_COST = 60  # what a request costs beyond its tokens, in tokens computed
_DECODE_COST = 50  # what a step of a batch of arms costs, likewise


@dataclass(frozen=True, slots=True)
class Job:
    """A case and what is measured of it."""

    case: Case
    arms: tuple[Arm, ...]
    wants: Wants

    @property
    def cost(self) -> int:
        """About what it takes, in tokens computed; for the estimate of what is left."""
        total = sum(len(ids) + _REQUEST_COST for donors in self.case.donors.values() for ids in donors)
        whole = len(self.case.prompt) + len(self.case.gold) - self.case.warm_len
        spliced = sum(end - start for start, end in self.case.blocks)
        for arm in self.arms:
            computed = len(self.case.gold) if arm.name == "exact" else whole
            if not arm.is_control:
                computed = whole - spliced + (arm.seam_tokens or 0) * len(self.case.blocks)
            total += computed + _REQUEST_COST
        return total + (self.wants.greedy_tokens * _DECODE_COST if self.wants.greedy_arms else 0)


class PassageJobs:
    """The prompts of GRID and SHIFT, which can be made without end."""

    def __init__(self, sizes: Sizes, pool: TextPool, text: ModelText, seed: int) -> None:
        self._sizes, self._pool, self._seed = sizes, pool, seed
        self._frames = FrameText(text)
        self._shifts = [shift for shift in sizes.shifts if shift + _SHIFT_ROOM <= text.context_len]
        self._context_len = text.context_len
        self._filler: list[int] = []

    def grid(self) -> Iterator[Job]:
        """Every number of blocks, donors computed in isolation and in context."""
        for number in range(self._sizes.prompts):
            yield from (self._grid_job(num_blocks, number) for num_blocks in self._sizes.blocks)

    def shift(self) -> Iterator[Job]:
        """Every shift that the model's context has room for.

        Raises:
            ConfigError: there is none.
        """
        if not self._shifts:
            raise ConfigError(
                f"no shift of {list(self._sizes.shifts)} fits into the model's context of {self._context_len} tokens."
            )
        for number in range(self._sizes.shift_prompts):
            yield from (self._shift_job(shift, number) for shift in self._shifts)

    def replacing(self, left_out: Iterable[str]) -> Iterator[Job]:
        """One more prompt, beyond those of `grid` and `shift`, for each that was left out, by their names."""
        for cell, count in Counter(name.rpartition("-")[0] for name in left_out).items():
            kind, _, place = cell.partition("-")
            for more in range(count):
                if kind == Experiment.GRID.value:
                    yield self._grid_job(int(place), self._sizes.prompts + more)
                elif kind == Experiment.SHIFT.value:
                    yield self._shift_job(int(place), self._sizes.shift_prompts + more)

    def _grid_job(self, num_blocks: int, number: int) -> Job:
        case = grid_case(self._frames, self._pool, num_blocks=num_blocks, number=number, seed=self._seed)
        arms = (*CONTROLS, *spliced_arms(self._sizes.seams, (Donors.ISOLATED, Donors.CONTEXT)))
        return Job(case, arms, _wants(self._sizes, number, greedy=True))

    def _shift_job(self, shift: int, number: int) -> Job:
        if not self._filler:
            self._filler = make_filler(self._pool, filler_len(self._frames, max(self._shifts)), self._seed)
        case = shift_case(self._frames, self._pool, self._filler, shift=shift, number=number, seed=self._seed)
        arms = (*CONTROLS, *spliced_arms((1,), (Donors.ISOLATED,)))
        return Job(case, arms, _wants(self._sizes, number, greedy=False))


def qa_jobs(sizes: Sizes, questions: Sequence[Question], text: ModelText, seed: int) -> Iterator[Job]:
    """Every question, with documents computed in one request in another order."""
    frames = QaFrames(text)
    shipped = msgspec.structs.replace(SHIPPED, donors=Donors.CONTEXT)
    # A key of the documents stands before the answer too: only runs as long as a document's are meant.
    whole = spliced_arms((1, LONG_SEAM), (Donors.CONTEXT,))
    every = [arm.overriding(arm.name, min_spliced_tokens=QA_MIN_SPLICED) for arm in whole]
    arms = (*CONTROLS, shipped, *every)
    generating = frozenset(arm.name for arm in arms)
    for question in questions:
        # An answer that is all there still fits behind a few words.
        num_tokens = max(sizes.answer_tokens, len(answer_ids(text, question)) + sizes.answer_tokens // 2)
        wants = Wants(greedy_arms=generating, greedy_tokens=num_tokens)
        yield Job(qa_case(frames, text, question, seed=seed), arms, wants)


# Header, block, tail, gold and the generated token.
_SHIFT_ROOM = 512


def _wants(sizes: Sizes, number: int, *, greedy: bool) -> Wants:
    generates = greedy and number < sizes.greedy_prompts
    return Wants(
        greedy_arms=_GREEDY_ARMS if generates else frozenset(),
        greedy_tokens=sizes.greedy_tokens,
        keys=number < sizes.key_prompts,
    )
