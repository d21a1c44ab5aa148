"""The draft model of speculative decoding: finds the one that SGLang uses, moves its rows, and checks them at start-up.

Draft and target share slots and page tables, but each has its own KV pool. If both have a pool for sliding windows, one
table maps a slot to its window slot for both. SGLang shifts the draft's input by one token, so a draft's row also
depends on the next token, and the last token of an equal span is computed. With multi-layer EAGLE each step has its own
model, a *head*, and the input of each head is shifted by one token more. Spliced draft rows may change how many draft
tokens are accepted, but never the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_pic.adapter.serve.forward import attach_gap_batch
from sglang_pic.adapter.serve.gap_batch import GapBatch
from sglang_pic.adapter.sglang.seams import BuildContext, ForwardBatch, ModelRunner
from sglang_pic.adapter.startup.draft_workers import drafts_of
from sglang_pic.adapter.startup.row_check import Bench, check_live_rows
from sglang_pic.adapter.support import refused_backend
from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.live_pools import view_pool
from sglang_pic.runtime.rope import read_geometry
from sglang_pic.runtime.splice import Splicer


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A draft model of one scheduler rank, or one of its heads."""

    worker: Any
    """SGLang's `EagleDraftWorker` or `MultiLayerEagleDraftWorker`."""
    runner: ModelRunner
    """Runs the draft model."""
    splicer: Splicer
    """Moves the draft's rows."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run the draft's passes as SGLang does; errors name the draft."""
        from sglang.srt.layers.moe import utils as moe
        from sglang.srt.speculative.spec_utils import draft_tp_context

        with ExitStack() as stack, named(self.runner):
            stack.enter_context(draft_tp_context(self.worker.parallel_layout))
            stack.enter_context(moe.speculative_moe_backend_context())
            stack.enter_context(moe.speculative_moe_a2a_backend_context())
            yield

    def spec_info(self, tokens: torch.Tensor) -> Any:
        """The `spec_info` of the draft's prefill of `tokens`, `[num_tokens]`, with hidden states made from the tokens.

        `hidden_states` is None for a draft that does not read the target's hidden states.
        """
        from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
        from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

        width, dtype = get_draft_recurrent_hidden_state_spec(self.runner)
        states = None
        if width is not None:
            seeds = [torch.Generator().manual_seed(token) for token in tokens.tolist()]
            states = torch.stack([torch.randn(width, generator=seed) for seed in seeds]).to(tokens.device, dtype)
        return EagleDraftExtendInput(hidden_states=states, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)


def read_drafts(ctx: BuildContext, target: Splicer) -> list[Draft]:
    """The draft model of a server, or its heads in the order of their steps; empty without a draft with KV rows.

    Args:
        ctx: SGLang's build context; its flags are supported.
        target: moves the target's rows.

    Raises:
        UnsupportedError: the draft's rows cannot be moved.
        ContractError: SGLang has no draft worker for this model, several, or one with another prefill than SGLang's.
    """
    algorithm: Any = ctx.tp_worker.model_runner.spec_algorithm
    if not (algorithm.is_eagle() or algorithm.is_standalone()):
        return []
    found = drafts_of(ctx.tp_worker)
    # A platform may replace the worker, but not its prefill.
    if len(found) != 1 or not _prefills_as_known(found[0]):
        raise ContractError(
            f"--speculative-algorithm {algorithm.name}: SGLang has the draft workers "
            f"{[type(each).__name__ for each in found]}; only one worker with SGLang's own prefill is supported; start "
            "without --speculative-algorithm, or without --radix-cache-backend pic."
        )
    (worker,) = found
    runners = getattr(worker, "draft_runner_list", [worker.draft_runner])
    return [Draft(worker, runner, _read_splicer(ctx, runner, target)) for runner in runners]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DraftBench(Bench):
    """`Bench` of a draft model."""

    spec_info: Callable[[torch.Tensor], Any]
    """The `spec_info` of a batch of these tokens."""

    def batch(self, tokens: torch.Tensor, written: torch.Tensor, position: int) -> ForwardBatch:
        batch = Bench.batch(self, tokens, written, position)
        batch.spec_info = self.spec_info(tokens)
        return batch

    def attach(self, batch: ForwardBatch, gap: GapBatch) -> None:
        """Copy the rows, which a draft's pass finds copied with the target's, and have it compute the gaps."""
        gap.reads.queue((self.splicer,), gap.locks)
        info: Any = batch.spec_info
        # The target's gap batch gives hidden states for computed tokens only.
        info.hidden_states = None if info.hidden_states is None else info.hidden_states[gap.kept]
        attach_gap_batch(batch, gap, of_draft=True)


def check_drafts(ctx: BuildContext, drafts: Sequence[Draft]) -> None:
    """`check_live_rows` of the drafts of a server."""
    for draft in drafts:
        with draft.serving():
            make = partial(DraftBench, spec_info=draft.spec_info)
            check_live_rows(ctx, draft.runner, draft.splicer, "draft model", make=make)


def _prefills_as_known(worker: Any) -> bool:
    """Whether a draft worker's prefill is one of SGLang's two, whose batches we reduce to the gaps."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    known: Any = EagleDraftWorker
    if hasattr(worker, "draft_runner_list"):
        from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleDraftWorker

        known = MultiLayerEagleDraftWorker
    return bool(type(worker)._draft_extend_for_prefill is known._draft_extend_for_prefill)


def _read_splicer(ctx: BuildContext, runner: ModelRunner, target: Splicer) -> Splicer:
    """The splicer of a draft model, over the slots of its target."""
    with named(runner):
        refusal = refused_backend(runner)
        if refusal:
            raise UnsupportedError(refusal)
        view = view_pool(runner.token_to_kv_pool)
        splicer = Splicer(view, read_geometry(runner.model, max_shift=ctx.model_config.context_len))
        if splicer.view.num_slots != target.view.num_slots:
            sizes = f"a KV pool of {splicer.view.num_slots!r} slots beside the target's {target.view.num_slots!r}"
            raise UnsupportedError(Refused("both must have as many, because rows of a slot move together").line(sizes))
        windows, theirs = splicer.view.windows, target.view.windows
        # A donor's window slots are looked up once, in the target's table.
        if windows is not None and (theirs is None or windows.slots is not theirs.slots):
            raise UnsupportedError(Refused("both must have the same").line("window slots that are not the target's"))
    return splicer


@contextmanager
def named(runner: ModelRunner) -> Iterator[None]:
    """Make errors name the draft model of `runner` and the draft's flags."""
    algorithm: Any = runner.spec_algorithm
    try:
        yield
    except (UnsupportedError, ContractError) as error:
        text = str(error).removesuffix(".")
        # A draft has one attention flag, for prefill and decode.
        text = re.sub(r" --prefill-attention-backend (\w+), and [^;]*", r" --attention-backend \1", text)
        for flag in ("attention-backend", "kv-cache-dtype"):
            text = re.sub(rf" --{flag}\b", f" --speculative-draft-{flag}", text)
        raise type(error)(
            f"the draft model of --speculative-algorithm {algorithm.name} ({type(runner.model).__name__}): {text}; "
            "else choose another draft, or start without --speculative-algorithm."
        ) from error
