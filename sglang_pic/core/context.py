"""The context rule: how near to a prompt's end a donor's rows may be spliced.

Rows carry what their request read before them, and the answer depends most on the end of a prompt. So the nearer to the
end a run lies, the better the donor's context must fit: what stood before the donor, and what stands before the run.

    [0, near_start)            any donor
    [near_start, tail_start)   the donor lacks at most `near_unseen_percent` of the text before the run
    [tail_start, last)         and at most `unseen_percent`, and has at most `foreign_tokens` that the prompt lacks
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from sglang_pic.core import token_loops
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.tokens import Tokens


class Misfit(NamedTuple):
    """How a donor's context differs from the text before a run."""

    num_foreign: int
    """Tokens of the donor's context that the prompt lacks."""
    num_unseen: int
    """Tokens of the prompt that the donor's context lacks."""


def compare_contexts(context: Tokens, here: Tokens, shifts: AbstractSet[int]) -> Misfit:
    """Compare a donor's context with the text before a run, token by token, at each of the shifts.

    A token that is found at another shift counts as missing, so the result may be too large, never too small. One token
    of the context may stand for several of the text.
    """
    num_foreign, num_unseen = token_loops.count_misfits(context, here, np.array([*shifts], np.int64))
    return Misfit(num_foreign, max(num_unseen, len(here) - len(context)))


class ContextRule:
    """The rule for one plan; counts the donors that did not fit.

    Args:
        policy: the limits.
        last: the end of the prompt, or of the part that may be spliced.
    """

    def __init__(self, policy: ReusePolicy, last: int) -> None:
        self._policy = policy
        self._tail_start = last - policy.tail_tokens
        self.near_start = last - (max(policy.near_tokens, policy.tail_tokens) if policy.tail_tokens else 0)
        """From this position on contexts are compared."""
        self._num_misfits = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether so many donors did not fit that no further one is compared: none is spliced beyond `near_start`."""
        return self._num_misfits >= self._policy.max_misfits

    def reach(self, end: int, misfit: Misfit, num_before: int) -> int:
        """Up to where a donor's rows may be spliced.

        Args:
            end: where the run would end.
            misfit: of the donor's context.
            num_before: tokens of the prompt that the context was compared with.
        """
        policy, percent = self._policy, 100 * misfit.num_unseen
        if misfit.num_foreign <= policy.foreign_tokens and percent <= policy.unseen_percent * num_before:
            return end
        reach = min(end, self._tail_start if percent <= policy.near_unseen_percent * num_before else self.near_start)
        self._num_misfits += reach < end
        return reach
