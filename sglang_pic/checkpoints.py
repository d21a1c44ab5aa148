"""Where a pass keeps its state: of the places where this prompt may be left, the one that pays most.

A model with recurrent state goes on only from where a state was kept, and a pass keeps one. SGLang keeps it where the
pass ends, or where an earlier prompt parted from this one. More is known by text: prompts part behind the same words
again (the end of a template's head, of the tools), also behind another clock, where no prompt has parted yet; and the
next turn leaves a prompt as far before its end as this one left the turn before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_pic.core.tokens import Tokens, common_len

_WORDS: Final = 32
"""Tokens before a place that name it."""
_MAX_PLACES: Final = 1024
_MAX_PROMPTS: Final = 64
_MAX_TAIL: Final = 1024
"""A turn that leaves the one before it earlier than so many tokens before its end is another branch."""
_NEAR: Final = 128
"""A prompt that parts from an earlier one so soon behind a place would have used a state there."""
_BASE: Final = np.uint64(0x9E3779B97F4A7C15)
_INVERSE: Final = np.uint64(pow(int(_BASE), -1, 1 << 64))


@dataclass(slots=True)
class _Share:
    """How often something was so, as a probability; one half before anything is known."""

    num_true: int = 1
    num_all: int = 2

    def add(self, is_true: bool) -> None:
        self.num_true += is_true
        self.num_all += 1

    @property
    def value(self) -> float:
        return self.num_true / self.num_all


@dataclass(slots=True)
class _Known:
    """A place by the words before it, and how often prompts parted there on how many paths."""

    words: bytes
    num_parted: int = 0
    num_paths: int = 1


class _Prompt(NamedTuple):
    namespace: int
    tokens: Tokens
    tail: int | None
    """How far before its end the prompt before it was left."""
    is_confirmed: bool
    """Whether that was so twice."""


class Checkpoints:
    """Statistics of earlier prompts, by which `choose`, called once for each prompt, places its state.

    Args:
        grid: states lie at multiples of so many tokens.
        chunk_len: tokens of a prefill chunk.
    """

    def __init__(self, grid: int, chunk_len: int) -> None:
        self._grid, self._chunk_len = grid, chunk_len
        self._goes_on, self._tail_holds = _Share(), _Share()
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._prompts: deque[_Prompt] = deque(maxlen=_MAX_PROMPTS)

    def choose(self, prompt: Tokens, state_len: int, branch: int | None, namespace: int = 0) -> int | None:
        """Where the state of this prompt is kept, and learn from the prompt.

        Args:
            prompt: `[num_tokens]`.
            state_len: tokens whose state the prompt goes on from.
            branch: where SGLang would keep it; None for where passes end.
            namespace: of the rows, 64 bits; nothing is learnt of others.

        Returns:
            A multiple of the grid behind `state_len`, or None for where passes end.
        """
        parted, learnt = self._learn(prompt, namespace)
        gain, position = max(self._gains(learnt, state_len, parted), default=(0.0, 0))
        return position if gain > 0 else branch

    def _learn(self, prompt: Tokens, namespace: int) -> tuple[int, _Prompt]:
        """Where the prompt parted from the nearest earlier one (0 for nowhere), and what is remembered of it."""
        before = [each for each in self._prompts if each.namespace == namespace]
        parted, nearest = max(((common_len(each.tokens, prompt), at) for at, each in enumerate(before)), default=(0, 0))
        tail: int | None = None
        is_confirmed = False
        if 0 < parted < len(prompt):
            last = before[nearest]
            left = len(last.tokens) - parted
            self._goes_on.add(left == 0)
            if last.tail is not None:
                self._tail_holds.add(abs(left - last.tail) < self._grid)
            tail, is_confirmed = (left, left == last.tail) if left <= _MAX_TAIL else (last.tail, last.is_confirmed)
            if left and parted >= _WORDS:
                self._count(prompt[parted - _WORDS : parted], namespace)
        found = _Prompt(namespace, prompt, tail, is_confirmed)
        self._prompts.append(found)
        return parted, found

    def _count(self, words: Tokens, namespace: int) -> None:
        name = int(_names(words)[0]) ^ namespace
        known = self._known.get(name)
        if known is None or known.words != words.tobytes():
            known = self._known[name] = _Known(words.tobytes())
            if len(self._known) > _MAX_PLACES:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        known.num_parted += 1

    def _gains(self, prompt: _Prompt, state_len: int, parted: int) -> Iterator[tuple[float, int]]:
        """`(gain, position)` of each place where the prompt may be left, on the grid and behind its own state.

        The gain: prompt tokens that a state there is expected to save, less those of the state at the pass's end.
        """
        num_tokens, tail = len(prompt.tokens), prompt.tail
        end = num_tokens - num_tokens % self._grid
        found: dict[int, float] = {}
        ends = self._goes_on.value
        if tail is not None and num_tokens - tail < end:
            found[num_tokens - tail] = 1.0 if prompt.is_confirmed else self._tail_holds.value
            ends *= 1 - found[num_tokens - tail]
        for position, known in self._find(prompt, state_len):
            if position > parted:
                known.num_paths += 1
            elif position != parted and parted - position <= _NEAR:
                known.num_parted += 1
            found[position] = max(found.get(position, 0.0), known.num_parted / known.num_paths)
        for position, times in found.items():
            at = position - position % self._grid
            if at > state_len:
                in_last = (at - state_len - 1) // self._chunk_len == (num_tokens - state_len - 1) // self._chunk_len
                lost = ends * (end - at) if in_last else 0.0
                yield times * (at - state_len) - lost, at

    def _find(self, remembered: _Prompt, state_len: int) -> Iterator[tuple[int, _Known]]:
        """The known places behind the state, with their positions."""
        prompt = remembered.tokens
        start = max(0, state_len - _WORDS + 1)
        if not self._known or len(prompt) - start < _WORDS:
            return
        names = _names(prompt[start:]) ^ np.uint64(remembered.namespace)
        hits = np.flatnonzero(np.isin(names, np.fromiter(self._known, np.uint64, len(self._known))))
        for at in hits.tolist():
            known = self._known[int(names[at])]
            position = start + at + _WORDS
            if position < len(prompt) and prompt[position - _WORDS : position].tobytes() == known.words:
                yield position, known


def _names(tokens: Tokens) -> NDArray[np.uint64]:
    """A hash of each `_WORDS` tokens: `[num_tokens - _WORDS + 1]`; one that moves names them alike at every place."""
    powers, inverses = (np.cumprod(np.full(len(tokens), base), dtype=np.uint64) for base in (_BASE, _INVERSE))
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers, out=sums[1:])
    return (sums[_WORDS:] - sums[:-_WORDS]) * inverses[: len(tokens) - _WORDS + 1]
