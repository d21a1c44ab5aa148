"""A model and its draft over pools of their own, computed by real attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from pic_kernels.numerics import relative_l2

from sglang_pic.adapter.probe.extend import trial_batch
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.runtime.live_pools import view_pool
from sglang_pic.runtime.splice import Splicer
from tests.helpers.builders import fail, make_path, request, request_state, scheduled, splice
from tests.helpers.row_runner import Runner, geometry_of

END, DONOR_POSITION = 40, 100

# [0, 10) gap | [10, 20) run | [20, 24) gap | [24, 36) run | [36, 40) gap
RUNS = ((10, 20), (24, 36))
HERE, DONOR_SLOTS = torch.arange(1, 1 + END), torch.arange(200, 200 + END)


class MediaRunner(Runner):
    """A target that notes what it embedded, as SGLang's models do of a batch with media."""

    def embed(self, batch: Any) -> torch.Tensor:
        own = super().embed(batch)
        batch.mm_input_embeds = own.flatten(1).clone()
        return own


class DraftRunner(Runner):
    """A draft that reads the target's hidden states beside its tokens, as EAGLE's does, or its tokens only.

    With media it is given the tokens' embeddings, except those of the last token of each sequence.
    """

    is_draft_worker = True

    def __init__(self, *, reads_hidden_states: bool) -> None:
        super().__init__()
        self.reads_hidden_states = reads_hidden_states
        self.embedding = torch.randn((1_000, 2, 64), generator=torch.Generator().manual_seed(1))

    def embed(self, batch: Any) -> torch.Tensor:
        own = super().embed(batch)
        if batch.mm_input_embeds is not None:
            given = batch.mm_input_embeds.view_as(own).clone()
            ends = (batch.extend_start_loc + batch.extend_seq_lens - 1).long()
            own = given.index_copy(0, ends, own[ends])
        if not self.reads_hidden_states:
            return own
        states = batch.spec_info.hidden_states
        assert len(states) == len(own), "a hidden state for each token of the batch"
        # As long as a token's own, so that attention looks beyond the token itself.
        return (own + states.view_as(own)) / 2


def half(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A pass that raises the first time, when its rows are written."""
    calls: list[None] = []

    def run(batch: Any) -> Any:
        calls.append(None)
        output = compute(batch)
        if len(calls) == 1:
            batch.mm_inputs = ["noted on the way"]
            fail()
        return output

    return run


class Pair:
    """A target and its draft, if any, over the same slots, and requests on them as SGLang's worker serves them.

    Of several heads each is given the tokens shifted by one more.
    """

    def __init__(self, *, reads_hidden_states: bool = False, num_heads: int = 1, has_media: bool = False) -> None:
        self.target = MediaRunner() if has_media else Runner()
        self.heads = [DraftRunner(reads_hidden_states=reads_hidden_states) for _ in range(num_heads)]
        for head in self.heads:
            if has_media:
                head.embedding = self.target.embedding
            head.req_to_token_pool = self.target.req_to_token_pool
        self.table = self.target.req_to_token_pool.req_to_token
        self.tokens = torch.arange(END) * 7 % 1_000
        self.path = make_path(splicer_of(self.target), *map(splicer_of, self.heads), recover=self._note)
        for runner in (self.target, *self.heads):
            runner.path = self.path
        self.released: list[str] = []
        self.noted: list[tuple[object, ...]] = []

    def _note(self, *given: object, is_admitted: bool, in_pass: bool) -> None:
        self.noted.append((*given, is_admitted, in_pass))

    def prefill(
        self,
        slots: torch.Tensor,
        position: int,
        pending: PendingSplice | None,
        following: int,
        arm: Callable[[], object] = lambda: None,
    ) -> None:
        """The target's pass, then the draft's over tokens that are shifted by one, `following` behind the last.

        Each leaves its batch as it was; `arm` is called when the first is laid out.
        """
        self.table[0, :END] = slots.to(self.table.dtype)
        state = request_state(pending=pending)
        req = request(pic=state, kv=SimpleNamespace(req_pool_idx=0))
        batch = scheduled([req], [END])

        def run(runners: list[Any], tokens: torch.Tensor, states: Any = None, media: Any = None) -> Any:
            made: Any = trial_batch(runners[0], [END], first_position=position, input_ids=tokens, slots=slots)
            made.spec_info, made.mm_input_embeds = SimpleNamespace(hidden_states=states), media
            before = {name: value for name, value in vars(made).items() if not isinstance(value, torch.Tensor)}
            self.path._prepare(made, object, batch, runners[0])  # type: ignore[arg-type]
            if runners[0] is self.target:
                arm()
            for runner in runners:
                output = runner.forward(replace(made) if len(runners) > 1 else made)
                made.input_ids[:] = torch.cat((made.input_ids[1:], torch.tensor([following])))
            made.mm_input_embeds = media  # SGLang's model notes them here, too.
            assert {name: vars(made)[name] for name in before} == before
            assert len(made.input_ids) == END
            return output.logits_output

        output = run([self.target], self.tokens.clone())
        if self.heads:
            shifted = torch.cat((self.tokens[1:], torch.tensor([following])))
            states = output.hidden_states.flatten(1) if self.heads[0].reads_hidden_states else None
            media = output.mm_input_embeds
            if media is not None:
                assert len(media) == END, "SGLang shifts them by the lengths of the whole batch"
                media = torch.cat((media[1:], torch.full_like(media[:1], torch.nan)))
            run(self.heads, shifted, states, media)

    def spliced(self, arm: Callable[[], object] = lambda: None) -> list[float]:
        """How far rows are from those of a full prefill, the target's and any head's, at gaps and at runs."""
        self.prefill(DONOR_SLOTS, DONOR_POSITION, None, following=5)
        self.prefill(HERE, 0, None, following=6)
        whole = [rows_of(runner) for runner in (self.target, *self.heads)]
        for runner in (self.target, *self.heads):
            for buffer in runner.buffers:
                buffer[HERE] = 9.0
        moved = splice(0, END, *((a, b, -DONOR_POSITION) for a, b in RUNS), slots=int(DONOR_SLOTS[0]))
        moved.locks.callback(self.released.append, "donors")
        self.prefill(HERE, 0, moved, following=6, arm=arm)
        at_runs = torch.zeros(END, dtype=torch.bool)
        for start, end in RUNS:
            at_runs[start:end] = True
        found = [rows_of(runner) for runner in (self.target, *self.heads)]
        target, *heads = (
            [relative_l2(rows[places].double(), right[places].double()) for places in (~at_runs, at_runs)]
            for rows, right in zip(found, whole, strict=True)
        )
        return [*target, *map(max, zip(*heads, strict=True))]


def splicer_of(runner: Runner) -> Splicer:
    return Splicer(view_pool(runner.token_to_kv_pool), geometry_of(runner))


def rows_of(runner: Runner) -> torch.Tensor:
    return torch.cat([buffer[HERE].flatten(1) for buffer in runner.buffers], dim=1)
