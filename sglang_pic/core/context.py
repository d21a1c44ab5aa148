"""The context rule: how near to a prompt's end a donor's rows may be spliced.

Rows depend on the text before them, and the answer depends most on the end of a prompt. So the nearer to the end a run
is, the more the text before its donor (the donor's context) must equal the text before the run:

    [0, near_start)            the context lacks at most `far_unseen_percent` of the text before a row, in its order
    [near_start, tail_start)   the context lacks at most `near_unseen_percent` of the text before the run
    [tail_start, last)         it lacks at most `unseen_percent`, and has at most `foreign_tokens` others
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from sglang_pic.core import token_loops
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.tokens import Tokens

_MOST_COMPARED, _MOST_REFUSED = 32, 4
"""Limits of one plan on tokens compared, and on tokens of refused runs, in lengths of the prompt: periodic text has a
long run at every shift."""


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
