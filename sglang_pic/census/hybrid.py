"""What the calls of a census would hit on a hybrid model, why not more, and what states at chosen places would add."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from sglang_pic.census.outcome import Outcome
from sglang_pic.census.states import StateRules, StateTree, Strategy


class Loss(Enum):
    """Why rows of a prompt were there, and the state behind them was not."""

    FORK = "fork"
    ANSWER = "answer"
    GRID = "grid"
    EVICTED = "evicted"

    @property
    def text(self) -> str:
        """The cause, in a clause."""
        return _TEXTS[self][0]

    def advice(self, rules: StateRules) -> str:
        """The server's flag that helps, in a sentence."""
        if self is Loss.FORK and rules.strategy is Strategy.NO_BUFFER:
            return "--mamba-radix-cache-strategy extra_buffer keeps a state where the second prompt parts."
        return _TEXTS[self][1]


_TEXTS: Final = {
    Loss.FORK: (
        "the prompt parts from earlier ones where no state was kept",
        "A smaller --chunked-prefill-size keeps more of them.",
    ),
    Loss.ANSWER: (
        "the prompt continues an answer that was too short for a state of its own",
        "A smaller --mamba-track-interval keeps more states in answers.",
    ),
    Loss.GRID: ("the state is at the last multiple of the grid", "No flag helps: less than one grid step is lost."),
    Loss.EVICTED: (
        "the state was evicted, and its rows were not or not for lack of room",
        "A larger --max-mamba-cache-size or --mamba-full-memory-ratio keeps more states.",
    ),
}


class HybridHit(NamedTuple):
    """Prefix hits of one call in tokens: `placed_len` may be less than `state_len` where states are evicted."""

    rows_len: int
    """Of a model without state, which needs rows alone."""
    state_len: int
    """By SGLang's rules."""
    placed_len: int
    """With states where `Checkpoints` has them kept, in the place of others."""
    num_states: int
    """States that were kept for it by SGLang's rules."""
    num_placed_states: int
    """Likewise with checkpoints."""
    loss: Loss | None
    """Why `state_len` is less than `rows_len`; None where it is not."""

    @property
    def num_lost(self) -> int:
        """Tokens that are computed although their rows were there."""
        return max(0, self.rows_len - self.state_len)


class HybridCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens that a hybrid model's prefix cache serves, in all calls."""

    state_tokens: int
    """By SGLang's rules; without state it is `prefix_tokens`."""
    lost_tokens: int
    """Tokens computed although their rows were there."""
    lost_by_cause: dict[str, int]
    placed_tokens: int
    """With states where `Checkpoints` has them kept, in the place of others."""
    num_states: int
    """That SGLang's rules kept, those counted that were evicted."""
    num_placed_states: int
    """Likewise with checkpoints."""


@dataclass(slots=True)
class HybridTally:
    """Adds up hits."""

    state_tokens: int = 0
    placed_tokens: int = 0
    losses: Counter[Loss] = field(default_factory=Counter)
    num_states: int = 0
    num_placed_states: int = 0

    def add(self, hit: HybridHit) -> None:
        """Count one call."""
        self.state_tokens += hit.state_len
        self.placed_tokens += hit.placed_len
        self.num_states += hit.num_states
        self.num_placed_states += hit.num_placed_states
        if hit.loss is not None:
            self.losses[hit.loss] += hit.num_lost

    def counts(self) -> HybridCounts:
        """The counts so far, the greatest loss first."""
        return HybridCounts(
            state_tokens=self.state_tokens,
            lost_tokens=self.losses.total(),
            lost_by_cause={loss.value: tokens for loss, tokens in self.losses.most_common()},
            placed_tokens=self.placed_tokens,
            num_states=self.num_states,
            num_placed_states=self.num_placed_states,
        )


class Hybrid:
    """One cache of a hybrid model's server, told every call in order.

    Args:
        rules: the server's.
    """

    def __init__(self, rules: StateRules) -> None:
        self.rules = rules
        self._stock, self._placed = StateTree(rules), StateTree(rules, chooses=True)
        self._all = self._stock
        if rules.max_states is not None:
            self._all = StateTree(msgspec.structs.replace(rules, max_states=None))

    def observe(self, outcome: Outcome) -> HybridHit:
        """Serve one call in each of the trees."""
        tokens, path = outcome.encoded.tokens, outcome.encoded.path
        before = self._stock.num_kept, self._placed.num_kept
        state_len = self._stock.serve(path, len(tokens)).state_len
        kept_len = state_len if self._all is self._stock else self._all.serve(path, len(tokens)).state_len
        placed_len = self._placed.serve(path, len(tokens)).state_len
        return HybridHit(
            outcome.prefix_len,
            state_len,
            placed_len,
            self._stock.num_kept - before[0],
            self._placed.num_kept - before[1],
            self._loss(outcome, state_len, kept_len),
        )

    def _loss(self, outcome: Outcome, state_len: int, kept_len: int) -> Loss | None:
        lost = outcome.prefix_len - state_len
        if lost <= 0:
            return None
        if kept_len > state_len:
            return Loss.EVICTED
        if lost < self.rules.grid:
            return Loss.GRID
        # Where the path goes on nothing parted: the state of the answer's end is missing.
        return Loss.FORK if len(outcome.expected) > 0 else Loss.ANSWER
