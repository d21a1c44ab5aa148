"""What the calls of a census would hit on a hybrid model, why not more, and what states at known forks would add.

A fork is a place where prompts that share text go on differently. The content index knows it by the text, also where
the text stands behind another clock than before: there no prompt has parted yet, and stock SGLang keeps no state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from sglang_pic.census.outcome import Outcome
from sglang_pic.census.states import StateRules, StateTree, Strategy

_TAIL_TOKENS: Final = 1024
"""A prompt parts from the next one at most so far before its end because of what its template ends with."""


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
        "States at known forks would help; a smaller --chunked-prefill-size keeps more of them.",
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
    """With further states at known forks."""
    num_states: int
    """States that were kept for it by SGLang's rules."""
    num_placed_states: int
    """Likewise with those at forks."""
    loss: Loss | None
    """Why `state_len` is less than `rows_len`; None where it is not."""

    @property
    def num_lost(self) -> int:
        """Tokens that are computed although their rows were there."""
        return max(0, self.rows_len - self.state_len)

    def explain(self, rules: StateRules) -> str:
        """What was lost, why and what helps, in sentences; empty where nothing was lost."""
        if self.loss is None:
            return ""
        there = f"Rows of {self.rows_len:,} tokens were there, the state only at {self.state_len:,}"
        more = f" States at known forks: at {self.placed_len:,}." if self.placed_len > self.state_len else ""
        return f"{there}: {self.loss.text}. {self.loss.advice(rules)}{more}"


class HybridCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens that a hybrid model's prefix cache serves, in all calls."""

    state_tokens: int
    """By SGLang's rules; without state it is `prefix_tokens`."""
    lost_tokens: int
    """Tokens computed although their rows were there."""
    lost_by_cause: dict[str, int]
    placed_tokens: int
    """With further states at known forks."""
    num_states: int
    """That SGLang's rules kept, those counted that were evicted."""
    num_placed_states: int
    """Likewise with those at forks."""


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
        self._stock, self._placed = StateTree(rules), StateTree(rules, cuts=True)
        self._all = self._stock
        if rules.max_states is not None:
            self._all = StateTree(msgspec.structs.replace(rules, max_states=None))
        # By call the forks of its path, each with how often it was one.
        self._forks: dict[int, Counter[int]] = {}
        self._prompt_lens: dict[int, int] = {}
        # By call how far before its end the latest prompt on its path was left, where that is known.
        self._tails: dict[int, int | None] = {}

    def observe(self, outcome: Outcome) -> HybridHit:
        """Serve one call in each of the trees."""
        tokens, path = outcome.encoded.tokens, outcome.encoded.path
        known = self._known_forks(outcome)
        before = self._stock.num_kept, self._placed.num_kept
        state_len = self._stock.serve(path, len(tokens)).state_len
        kept_len = state_len if self._all is self._stock else self._all.serve(path, len(tokens)).state_len
        places = self._places(known, state_len, len(tokens), self._tail(outcome))
        placed_len = self._placed.serve(path, len(tokens), places).state_len
        self._note_forks(outcome, known)
        return HybridHit(
            outcome.prefix_len,
            state_len,
            placed_len,
            self._stock.num_kept - before[0],
            self._placed.num_kept - before[1],
            self._loss(outcome, state_len, kept_len),
        )

    def _places(self, known: Counter[int], state_len: int, prompt_len: int, tail: int | None) -> list[int]:
        """Where states are kept beside stock's: at the fork that has saved most, and where the next turn may part."""
        ahead = Counter({at: times * at for at, times in known.items() if state_len < at < prompt_len})
        ends = [] if tail is None or tail > _TAIL_TOKENS else [max(0, prompt_len - tail)]
        return [at for at, _ in ahead.most_common(1)] + ends

    def _tail(self, outcome: Outcome) -> int | None:
        """How far before its end this prompt will be left, if it is as the one before on its path."""
        tail = None
        if outcome.neighbor is not None:
            left = self._prompt_lens[outcome.neighbor.number] - outcome.prefix_len
            tail = left if left > 0 and len(outcome.expected) > 0 else self._tails[outcome.neighbor.number]
        number = outcome.ref.number
        self._tails[number], self._prompt_lens[number] = tail, len(outcome.encoded.tokens)
        return tail

    def _known_forks(self, outcome: Outcome) -> Counter[int]:
        """The forks of this prompt's text, as positions in it: of the path that it begins like, of its runs' donors,
        and the ends of runs, where it parts from them."""
        found: Counter[int] = Counter()
        if outcome.neighbor is not None:
            forks = self._forks[outcome.neighbor.number]
            found.update({at: times for at, times in forks.items() if at <= outcome.prefix_len})
        for run in outcome.runs:
            start, end = run.start - run.seam_len - run.shift, run.end - run.shift
            forks = self._forks[run.donor.number]
            found.update({at + run.shift: times for at, times in forks.items() if start < at <= end})
            found[run.end] += 1
        return found

    def _note_forks(self, outcome: Outcome, known: Counter[int]) -> None:
        own = self._forks[outcome.ref.number] = known
        if outcome.neighbor is not None and len(outcome.expected) > 0:
            own[outcome.prefix_len] += 1
            self._forks[outcome.neighbor.number][outcome.prefix_len] += 1
        for run in outcome.runs:
            self._forks[run.donor.number][run.end - run.shift] += 1

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
