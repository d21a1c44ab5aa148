"""Counts the prefixes that a hybrid model's server can serve, by SGLang's rules for checkpoints of recurrent state.

Layers with recurrent state (state-space or linear attention) keep one state of a prompt, and no row for each token. A
request goes on from the deepest *state* on its path, however far the rows of the attention layers reach. The rules are
those of SGLang 0.5.23, for requests that come one at a time; paths are below `sglang/srt`.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from pic_traces.encode.encoded import Tokens

from sglang_pic.checkpoints import Checkpoints
from sglang_pic.core.trie import Node, Trie


class Strategy(Enum):
    """The values of `--mamba-radix-cache-strategy`; `auto` is `extra_buffer` unless overlap is off and pages are 1."""

    EXTRA_BUFFER = "extra_buffer"
    """States are copied while a chunk is computed, at multiples of a grid."""
    NO_BUFFER = "no_buffer"
    """States are copied between passes, wherever these end."""


class StateRules(NamedTuple):
    """Where a server keeps states; lengths in tokens, pages of one token."""

    strategy: Strategy = Strategy.EXTRA_BUFFER
    chunked_prefill_size: int = 8192
    mamba_chunk_size: int = 64
    """Of the model: 64 for linear attention, 128 or 256 in the configurations of Nemotron and other Mamba-2 models."""
    mamba_track_interval: int = 256

    @property
    def grid(self) -> int:
        """States of a prefill are at multiples of this from where the pass began (`mamba_checkpoint_grid` in
        `runtime_context.py`); 1 where a pass may end anywhere."""
        return 1 if self.strategy is Strategy.NO_BUFFER else self.mamba_chunk_size

    @property
    def answer_grid(self) -> int:
        """States of an answer are at multiples of this (`mamba_track_grid`, likewise)."""
        return 1 if self.strategy is Strategy.NO_BUFFER else math.lcm(self.grid, self.mamba_track_interval)


class StateHit(NamedTuple):
    """The cached part of one prompt, in tokens."""

    state_len: int
    """The deepest state: the request is computed from here on."""
    rows_len: int
    """Rows of the attention layers in the tree. Behind its last state a request leaves none there."""


class StateTree:
    """The paths of all calls so far, with their states; calls come one after the other.

    Args:
        rules: the server's.
        chooses: whether `Checkpoints` chooses where a state is kept, with a strategy that can.
    """

    def __init__(self, rules: StateRules, *, chooses: bool = False) -> None:
        self.rules = rules
        self._checkpoints: Checkpoints | None = None
        if chooses and rules.strategy is Strategy.EXTRA_BUFFER:
            self._checkpoints = Checkpoints(rules.grid, rules.chunked_prefill_size)
        self._trie = Trie(None, OrderedDict(), itertools.count())
        # The nodes with a state at their end, by serial.
        self._kept: dict[int, Node] = {}

    def serve(self, path: Tokens, prompt_len: int) -> StateHit:
        """Match a prompt, compute the rest of it and the answer, and keep states on the way.

        Args:
            path: prompt and answer, `[num_tokens]`.
            prompt_len: tokens of the prompt, 1 or more.
        """
        hit = self._match(path[: prompt_len - 1])
        branch = hit.rows_len - hit.rows_len % self.rules.grid
        if self._checkpoints is not None:
            own = branch if branch > hit.state_len else None
            branch = self._checkpoints.choose(path[:prompt_len], hit.state_len, own) or 0
        at = hit.state_len
        while at < prompt_len:
            end = min(at + self.rules.chunked_prefill_size, prompt_len)
            if kept := self._tracked(at, end, branch):
                self._keep(path[:kept])
            at = end
        # The last token of an answer is never computed.
        last = len(path) - 1
        last -= last % self.rules.answer_grid
        if last > prompt_len:
            self._keep(path[:last])
        return hit

    def _match(self, prompt: Tokens) -> StateHit:
        """The deepest state on the way (`MambaComponent.create_match_validator` in
        `mem_cache/unified_cache/components/mamba.py`)."""
        node, rows_len = self._trie.walk(prompt)
        at: Node | None = node if rows_len == node.end else node.parent
        while at is not None and at.serial not in self._kept:
            at = at.parent
        return StateHit(0 if at is None else at.end, rows_len)

    def _tracked(self, start: int, end: int, branch: int) -> int:
        """Where the state of a prefill chunk `[start, end)` is kept; 0 for nowhere.

        `extra_buffer`: `_mamba_radix_cache_v2_req_prepare_for_extend` in `managers/schedule_batch.py`: the last place
        on the grid, or in its stead the one where an earlier prompt parted (`mamba_branching_seqlen`, set by
        `MambaComponent.finalize_match_result_in_tree_core`). `no_buffer`: the chunk's end, as
        `MambaComponent.prepare_for_caching_req` copies the state that the request has.
        """
        grid = self.rules.grid
        if grid == 1:
            return end
        if end - start < grid:
            return 0
        return branch if start < branch < end and (branch - start) % grid == 0 else end - (end - start) % grid

    def _keep(self, path: Tokens) -> None:
        """Insert a path with the state at its end (`MambaComponent.commit_insert_component_data`); a node that is cut
        keeps its state at its lower end (`redistribute_on_node_split`)."""
        node, stored = self._trie.walk(path)
        if stored < node.end:
            lower = self._trie.split(node, stored)
            if self._kept.pop(node.serial, None) is not None:
                self._kept[lower.serial] = lower
        if stored < len(path):
            node = self._trie.append(node, path[stored:])
        self._kept[node.serial] = node
