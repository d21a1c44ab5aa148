"""What a plan is asked: one prompt, the donors that it may take, and the limits of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_pic.core.donors import DonorTable
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.path import PlanPaths
from sglang_pic.core.plan import DropReason, PlanOptions
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.row_source import RowSource
from sglang_pic.core.tokens import Tokens
from sglang_pic.core.trie import Node, Trie


@dataclass(slots=True, kw_only=True)
class Query:
    """One prompt to be planned, and what the stages of planning share."""

    policy: ReusePolicy
    options: PlanOptions
    """The request's limits; their `policy` is ignored."""
    trie: Trie
    """The paths of the prompt's namespace."""
    donors: DonorTable
    lexicon: Lexicon | None
    tokens: Tokens
    """The prompt."""
    prefix_len: int
    """Length of the tree's exact match."""
    rows: RowSource
    forget: Callable[[Node, int], None]
    """`forget(node, position)` drops the path to `node` from `position` on."""
    row_lookahead: int
    """Tokens after a row that it depends on: so many at the end of an equal span are computed."""
    paths: PlanPaths = field(init=False)
    """The paths of the donors."""
    dropped: Counter[DropReason] = field(init=False, default_factory=Counter)
    """Counts candidates that are no runs, by reason."""
    work: int = field(init=False, default=0)
    """Cost of finding runs so far, in tokens compared, beside that of the paths, the trie's steps and alignments."""
    stop: int = field(init=False)
    """Runs end here: the last token, and all from the first wanted logprob on, are computed."""
    tail_start: int = field(init=False)
    """From here on only pinned rows, and those with exactly the same tokens before them, are spliced."""

    def __post_init__(self) -> None:
        compute_from = self.options.compute_from
        last = self.end if compute_from is None else min(self.end, compute_from + 1)
        self.stop, self.tail_start = last - 1, last - self.policy.tail_tokens
        self.paths = PlanPaths(self.tokens)

    @property
    def end(self) -> int:
        """The prompt's length."""
        return len(self.tokens)

    def is_worth_it(self, num_tokens: int, gap_start: int | None) -> bool:
        """Whether splicing a run saves time, by the measured costs; True without them.

        Args:
            gap_start: of the gap that the run adds, if it adds one.
        """
        return self.options.cost is None or self.options.cost.saves(num_tokens, gap_start) > 0
