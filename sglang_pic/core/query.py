"""What a plan is asked: one prompt, the donors that it may take, and the limits of its runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sglang_pic.core.donors import DonorTable
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.plan import PlanOptions
from sglang_pic.core.policy import ReusePolicy
from sglang_pic.core.row_source import RowSource
from sglang_pic.core.tokens import Tokens
from sglang_pic.core.trie import Node, Trie


class RunLimits(NamedTuple):
    """Limits of every run of one plan."""

    stop: int
    """Runs end here: the last token, and all from the first wanted logprob on, are computed."""
    tail_start: int
    """From here on only pinned rows, and those with exactly the same tokens before them, are spliced."""
    sink: int
    seam: int
    min_run: int
    min_spliced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One prompt to be planned; nothing of it changes while it is.

    Args:
        policy: which runs are taken.
        options: the request's limits; their `policy` is ignored.
        trie: the paths of the prompt's namespace.
        donors: the donors on them.
        lexicon: the texts of the tokens, for the guard of changed fields.
        tokens: the prompt.
        prefix_len: length of the tree's exact match.
        rows: of the donors.
        forget: `forget(node, position)` drops the path to `node` from `position` on.
        row_lookahead: tokens after a row that it depends on: so many at the end of an equal span are computed.
    """

    policy: ReusePolicy
    options: PlanOptions
    trie: Trie
    donors: DonorTable
    lexicon: Lexicon | None
    tokens: Tokens
    prefix_len: int
    rows: RowSource
    forget: Callable[[Node, int], None]
    row_lookahead: int = 0

    @property
    def end(self) -> int:
        """The prompt's length."""
        return len(self.tokens)

    @property
    def limits(self) -> RunLimits:
        """The limits of its runs."""
        policy, compute_from = self.policy, self.options.compute_from
        last = self.end if compute_from is None else min(self.end, compute_from + 1)
        return RunLimits(
            stop=last - 1,
            tail_start=last - policy.tail_tokens,
            sink=policy.sink_tokens,
            seam=policy.seam_tokens,
            min_run=policy.min_run_tokens,
            min_spliced=policy.min_spliced_tokens,
        )
