"""The context rule: how near to a prompt's end a donor's rows may be spliced.

Rows depend on the text before them, and the answer depends most on the end of a prompt. So the nearer to the end a run
is, the more the text before its donor (the donor's context) must equal the text before the run:

    anywhere                   at most `reordered_percent` of the context is after the run in the prompt
    [0, near_start)            the context lacks at most `far_unseen_percent` of the text before a row, in its order
    [near_start, tail_start)   the context lacks at most `near_unseen_percent` of the text before the run
    [tail_start, last)         it lacks at most `unseen_percent`, and has at most `foreign_tokens` others
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from sglang_pic.core import token_loops
from sglang_pic.core.plan import Run
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.tokens import TOKEN_BYTES, Tokens, common_len

_MOST_COMPARED, _MOST_REFUSED = 32, 4
"""Limits of one plan on tokens compared, and on tokens of refused runs, in lengths of the prompt: periodic text has a
long run at every shift."""
# Most spans of one prompt that are searched for; periodic text has one at every shift.
_MOST_SEARCHED = 64
# Likewise of those before a donor in the same order.
_MOST_CHAINED = 256
# Contexts are compared at the shift of an equal span so far before and after it.
_BESIDE_TOKENS = 256


class Misfit(NamedTuple):
    """How a donor's context differs from the text before a run."""

    num_foreign: int
    """Tokens of the donor's context that the prompt lacks."""
    num_unseen: int
    """Tokens of the prompt that the donor's context lacks."""


class Moved(NamedTuple):
    """Tokens `[start, end)` of the prompt that are at `[start - shift, end - shift)` of a donor's path."""

    start: int
    end: int
    shift: int


def compare_contexts(context: Tokens, here: Tokens, shifts: AbstractSet[int], moved: Sequence[Moved] = ()) -> Misfit:
    """Count the tokens of a donor's context and of the text before a run that the other lacks.

    All of `here` is compared at each of `shifts`, and parts of it at the shifts of `moved`. A token that is equal only
    at another shift counts as missing, so counts may be too large, never too small. One token of the context may match
    several of `here`.
    """
    places = [*(Moved(0, len(here), shift) for shift in shifts), *moved]
    num_foreign, num_unseen = token_loops.count_misfits(context, here, np.array(places, np.int64).reshape(-1))
    return Misfit(num_foreign, max(num_unseen, len(here) - len(context)))


class EqualSpans:
    """The equal spans that were found in one prompt, spliced or not.

    A request that puts documents, tools or files in another order has donors that read a text before another one,
    which the prompt has after it. Qwen2.5-Coder-0.5B then loses right answers (bench/results/study/models.md).
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], int] = {}
        self._num_searched = 0

    @property
    def num_chained(self) -> int:
        """Spans that `in_order` looks at."""
        return min(len(self._ends), _MOST_CHAINED)

    def add(self, start: int, end: int, shift: int) -> None:
        """Note that tokens `[start, end)` of the prompt are at `[start - shift, end - shift)` of a donor's path."""
        self._ends[start, shift] = max(end, self._ends.get((start, shift), 0))

    def in_order(self, donor_start: int) -> list[Moved]:
        """The spans, and the text beside them, whose text is before a donor's in the same order, the last one first."""
        kept, end = [], donor_start
        for (start, shift), stop in itertools.islice(reversed(self._ends.items()), _MOST_CHAINED):
            if stop - shift <= end:
                kept.append(Moved(start - _BESIDE_TOKENS, stop + _BESIDE_TOKENS, shift))
                end = start - shift
        return kept

    def are_in_order(self, runs: Sequence[Run], tokens: Tokens, limits: Sequence[int]) -> list[bool]:
        """For each run whether no more than its limit of the tokens before its donor are after the run in the prompt.

        Tokens that are before the run, too, do not count. After `_MOST_SEARCHED` spans a run whose spans exceed its
        limit is taken to be out of order. Cost: O(runs * spans) in numpy, and O(tokens) for each such span.
        """
        starts, shifts = np.array([*self._ends], np.int64).reshape(-1, 2).T
        ends = np.array([*self._ends.values()], np.int64)
        # The parts of the spans that are after a run, as places on its donor's path before the donor.
        after = np.array([run.target_end for run in runs])[:, None]
        starts = np.maximum(np.maximum(starts, after) - shifts, 0)
        ends = np.minimum(ends - shifts, np.array([run.donor_start for run in runs])[:, None])
        most = np.maximum(ends - starts, 0).sum(axis=1).tolist()
        data = tokens.tobytes() if any(map(int.__gt__, most, limits)) else b""
        return [
            num <= limit
            or self._is_in_order(run, tokens, data, sorted(zip(first, last, shifts.tolist(), strict=True)), limit)
            for run, num, limit, first, last in zip(runs, most, limits, starts.tolist(), ends.tolist(), strict=True)
        ]

    def _is_in_order(
        self, run: Run, tokens: Tokens, data: bytes, parts: Sequence[tuple[int, int, int]], limit: int
    ) -> bool:
        """Whether the donor's path has few enough tokens of `parts`, each place counted once."""
        if self._num_searched >= _MOST_SEARCHED:
            return False
        num = counted = 0
        for start, end, shift in parts:
            first = max(start, counted)
            if num > limit or first >= end:
                continue
            here = first + shift
            num_equal = common_len(run.donor.tokens(end)[first:], tokens[here : here + end - first])
            text = data[TOKEN_BYTES * here : TOKEN_BYTES * (here + num_equal)]
            num += num_equal if data.find(text, 0, TOKEN_BYTES * run.target_end) < 0 else 0
            counted = end
            self._num_searched += 1
        return num <= limit


class ContextRule:
    """The rule for one plan; counts the donors whose context does not fit.

    Args:
        policy: the limits.
        last: the end of the prompt, or of the part that may be spliced.
    """

    def __init__(self, policy: ReusePolicy, last: int) -> None:
        self._policy = policy
        self._tail_start = last - policy.tail_tokens
        self.near_start = last - (max(policy.near_tokens, policy.tail_tokens) if policy.tail_tokens else 0)
        """From this position on contexts are compared."""
        self.far_end = self.near_start if policy.tail_tokens and policy.far_unseen_percent < 100 else 0
        """Before this position contexts are compared in order."""
        self._num_misfits = self._num_compared = self._num_refused = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether `max_misfits` is reached: nothing more is compared, or spliced, after `near_start`."""
        return self._num_misfits >= self._policy.max_misfits

    @property
    def is_far_exhausted(self) -> bool:
        """Whether the limits of work are reached: nothing more is spliced before `far_end`."""
        most = max(1, self.far_end)
        return self._num_compared > _MOST_COMPARED * most or self._num_refused > _MOST_REFUSED * most

    def far_start(self, start: int, end: int, num_unseen: int) -> int:
        """The first position before `far_end` from which a run's rows fit; `far_end` if none does.

        If the donor lacks no more than a changed field's length, such as another header, rows further down the run
        fit: the run itself makes their contexts equal enough.

        Args:
            start: where the run would begin.
            end: where it would end.
            num_unseen: tokens before the run that the donor's context lacks.
        """
        percent = self._policy.far_unseen_percent
        self._num_compared += start
        if 100 * num_unseen <= percent * start:
            return start
        first = self.far_end
        if percent and not self.is_too_much(num_unseen, start):
            first = min(first, -(-100 * num_unseen // percent))
        self._num_refused += min(end, first) - start
        return first

    def is_too_much(self, num_unseen: int, start: int) -> bool:
        """Whether no row of a run before `far_end` fits, given how many tokens before it the donor lacks."""
        policy = self._policy
        return num_unseen > policy.max_field_tokens and 100 * num_unseen > policy.far_unseen_percent * start

    def reach(self, end: int, misfit: Misfit, num_before: int) -> int:
        """The end of the part of a run that may be spliced.

        Args:
            end: where the run would end.
            misfit: how the donor's context differs.
            num_before: tokens of the prompt that the context was compared with.
        """
        policy, percent = self._policy, 100 * misfit.num_unseen
        if misfit.num_foreign <= policy.foreign_tokens and percent <= policy.unseen_percent * num_before:
            return end
        reach = min(end, self._tail_start if percent <= policy.near_unseen_percent * num_before else self.near_start)
        self._num_misfits += reach < end
        return reach
