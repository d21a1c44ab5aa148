"""Counts the prefix hits of a census's calls on a hybrid model, with SGLang's states and with checkpoints."""

from __future__ import annotations

import msgspec

from sglang_pic.census.outcome import Outcome
from sglang_pic.census.states import StateRules, StateTree


class HybridCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens that a hybrid model's prefix cache serves."""

    state_tokens: int = 0
    """With the states that SGLang keeps; a model without state is served `prefix_tokens`."""
    placed_tokens: int = 0
    """With states where `Checkpoints` has them kept, in the place of others."""

    def plus(self, other: HybridCounts) -> HybridCounts:
        """The sums."""
        return HybridCounts(
            state_tokens=self.state_tokens + other.state_tokens, placed_tokens=self.placed_tokens + other.placed_tokens
        )


class Hybrid:
    """One cache of a hybrid model's server; calls come in order.

    Args:
        rules: the server's.
    """

    def __init__(self, rules: StateRules) -> None:
        self._stock, self._placed = StateTree(rules), StateTree(rules, chooses=True)

    def observe(self, outcome: Outcome) -> HybridCounts:
        """Serve one call, with and without checkpoints."""
        path, prompt_len = outcome.encoded.path, len(outcome.encoded.tokens)
        stock, placed = (tree.serve(path, prompt_len).state_len for tree in (self._stock, self._placed))
        return HybridCounts(state_tokens=stock, placed_tokens=placed)
