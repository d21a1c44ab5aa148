"""Gap prefill: one forward pass over the gaps of all requests of a batch.

Every gap `[a, b)` becomes a *virtual sequence* with its request's own row, `extend_prefix_len = a`,
`extend_seq_len = b - a`, `seq_len = b`. A layer writes its KV into the pool before attention reads the row, so a later
gap sees the earlier gaps of that layer and the spliced runs between them: one pass gives the causal result.

    row of one request
    [0, P)      prefix hit        owned by the tree
    [P, a)      gap               computed: virtual sequence 0
    [a, b)      run               spliced before the pass
    [b, end)    gap               computed: virtual sequence 1, its last token gives the logits

Nothing here waits for the device: what it has to be told goes there in one copy when the batch is laid out, and the
rest is derived there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_pic.adapter.seams import ForwardBatch, ModelRunner
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.core import Run


@dataclass(slots=True)
class Splice:
    """The rows to move before the pass: all three tensors are `[num_tokens]` on the pool's device."""

    src: torch.Tensor
    dst: torch.Tensor
    shifts: torch.Tensor


class _Tables(NamedTuple):
    """What the device is told of a gap batch; int64 where it is an index, else int32."""

    owners: torch.Tensor
    """`[num_sequences]`, as `GapBatch.owners`; likewise the next two."""
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    computed_lens: torch.Tensor
    """`[num_requests]`."""
    kept: torch.Tensor
    """`[num_computed]`."""
    shifts: torch.Tensor
    """`[num_spliced]`, int64."""


@dataclass(slots=True)
class GapBatch:
    """How a batch is narrowed to its gaps, and how it is seen again request by request for the logits."""

    splice: Splice
    owners: list[int]
    """Per virtual sequence, the index of its request in the batch."""
    prefix_lens: list[int]
    seq_lens: list[int]
    tables: _Tables
    computed_lens: list[int]
    """Per request, how many tokens it computes."""
    start_lens: list[int]
    """Per request, `extend_logprob_start_len` counted in computed tokens."""
    locks: ExitStack = field(default_factory=ExitStack)
    """Keeps the donors' rows in the tree until whoever executes the splice closes it."""

    @property
    def kept(self) -> torch.Tensor:
        """Which tokens of the flat extend are computed, `[num_computed]`, int64, on the model's device."""
        return self.tables.kept

    @contextmanager
    def narrowed(self, forward_batch: ForwardBatch, model_runner: ModelRunner) -> Iterator[None]:
        """Rewrite `forward_batch` to the virtual sequences, and put it back on leaving, also on an error."""
        replaced = self._narrow_fields(forward_batch)
        saved = {name: getattr(forward_batch, name) for name in (*replaced, *_BOUND_FIELDS)}
        for name, value in replaced.items():
            setattr(forward_batch, name, value)
        translator = model_runner.kv_index_translator
        translator.own_plan(forward_batch).bind(forward_batch, translator)
        if model_runner.lora_manager is not None:
            # Prepared for the whole extend, adapters would be applied to the wrong tokens. A request's computed tokens
            # lie together, so its adapter is that of one segment, as the logits step expects it.
            view = self.per_request_view(forward_batch)
            view.batch_size, view.lora_ids = len(self.computed_lens), saved.get("lora_ids")
            model_runner.lora_manager.prepare_lora_batch(view)
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(forward_batch, name, value)

    def per_request_view(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """The batch as the logits step must see it: lengths by request, in computed tokens.

        `forward_batch` may be the runner's own copy of the narrowed batch; it is not changed.
        """
        view = copy.copy(forward_batch)
        view.extend_seq_lens = self.tables.computed_lens.to(forward_batch.extend_seq_lens.dtype)
        view.extend_seq_lens_cpu = list(self.computed_lens)
        view.extend_logprob_start_lens_cpu = list(self.start_lens)
        return view

    def _narrow_fields(self, fb: ForwardBatch) -> dict[str, Any]:
        tables = self.tables
        owners = torch.tensor(self.owners, dtype=torch.int64)
        extend_lens = tables.seq_lens - tables.prefix_lens
        total = tables.kept.numel()
        fields: dict[str, Any] = {
            "batch_size": len(self.owners),
            "seq_lens": tables.seq_lens.to(fb.seq_lens.dtype),
            "seq_lens_cpu": torch.tensor(self.seq_lens, dtype=torch.int64),
            "seq_lens_sum": sum(self.seq_lens),
            "extend_num_tokens": total,
            "extend_seq_lens": extend_lens,
            "extend_seq_lens_cpu": [end - start for start, end in zip(self.prefix_lens, self.seq_lens, strict=True)],
            "extend_prefix_lens": tables.prefix_lens,
            "extend_prefix_lens_cpu": list(self.prefix_lens),
            "extend_start_loc": torch.cumsum(extend_lens, 0, dtype=torch.int32) - extend_lens,
            "global_num_token_non_padded_cpu": total,
        }
        for name, index in (
            *((name, self.kept) for name in ("input_ids", "positions", "out_cache_loc", "mm_token_modalities")),
            *((name, tables.owners) for name in ("req_pool_indices", "orig_seq_lens")),
            ("req_pool_indices_cpu", owners),
            ("mrope_positions", (slice(None), self.kept)),
        ):
            whole = getattr(fb, name)
            if whole is not None:
                fields[name] = whole[index]
        # A request with media has one sequence, itself; the model looks here for what its tokens stand for.
        for name in ("rids", "lora_ids", "mm_inputs"):
            whole = getattr(fb, name)
            if whole is not None:
                fields[name] = [whole[i] for i in self.owners]
        if fb.global_num_token_non_padded is not None:
            fields["global_num_token_non_padded"] = torch.full_like(fb.global_num_token_non_padded, total)
        return fields


# What `KVLocPlan.bind` sets on a batch beside `out_cache_loc`.
_BOUND_FIELDS = ("kv_loc_plan", "kv_loc_cols", "out_cache_loc_virtual", "out_cache_loc_is_physical")


def build_gap_batch(
    pending: Sequence[PendingSplice | None],
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    start_lens: Sequence[int],
    rows: Sequence[torch.Tensor],
    device: torch.device,
) -> GapBatch:
    """Lay out the gap prefill of a batch.

    Args:
        pending: per request, its splice, whose locks the layout takes over, or `None` where all of it is computed.
        prefix_lens: per request, tokens that are in its row already.
        extend_lens: per request, tokens of the batch's flat extend.
        start_lens: per request, `extend_logprob_start_len`.
        rows: per request, its row of slots; read for requests with a splice only.
        device: where the model runs.

    Returns:
        The layout; its splice covers every run of every request.
    """
    owners, starts, ends, firsts, computed, logprob_starts = [], [], [], [], [], []
    moves: list[_Move] = []
    locks = ExitStack()
    offset = 0
    for i, (splice, prefix_len, extend_len) in enumerate(zip(pending, prefix_lens, extend_lens, strict=True)):
        gaps = [(prefix_len, prefix_len + extend_len)] if splice is None else splice.plan.gaps
        for start, end in gaps:
            owners.append(i)
            starts.append(start)
            ends.append(end)
            firsts.append(offset + start - prefix_len)
        computed.append(sum(end - start for start, end in gaps))
        # Everything from the first wanted logprob on is computed: as many tokens as in the whole extend.
        logprob_starts.append(computed[-1] - (extend_len - start_lens[i]))
        assert logprob_starts[-1] >= 0, "a token whose logprob is wanted was spliced"
        if splice is not None:
            moves += [_Move(run, slots, rows[i]) for run, slots in splice.sources]
            locks.push(splice.locks)
        offset += extend_len
    shifts, run_lens = (
        np.array(each, dtype=np.int64)
        for each in ([move.run.shift for move in moves], [move.run.num_tokens for move in moves])
    )
    numbers = [np.array(each, dtype=np.int32) for each in (starts, ends, computed)]
    kept = _spans(firsts, np.subtract(ends, starts))
    tables = _Tables(*_stage([np.array(owners, dtype=np.int64), *numbers, kept, np.repeat(shifts, run_lens)], device))
    return GapBatch(
        splice=_gather_splice(moves, tables.shifts),
        owners=owners,
        prefix_lens=starts,
        seq_lens=ends,
        tables=tables,
        computed_lens=computed,
        start_lens=logprob_starts,
        locks=locks,
    )


class _Move(NamedTuple):
    """A run, the slots that it is read from, and the row of slots that it is written to."""

    run: Run
    slots: torch.Tensor
    row: torch.Tensor


def _gather_splice(moves: Sequence[_Move], shifts: torch.Tensor) -> Splice:
    if not moves:
        return Splice(shifts, shifts, shifts)
    return Splice(
        src=torch.cat([slots for _, slots, _ in moves]),
        dst=torch.cat([row[run.target_start : run.target_end] for run, _, row in moves]).to(torch.int64),
        shifts=shifts,
    )


def _spans(firsts: Sequence[int], lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers of spans of `lens` that begin at `firsts`, one span after the other."""
    before = np.cumsum(lens) - lens
    return np.arange(lens.sum()) + np.repeat(np.subtract(firsts, before), lens)


def _stage(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on `device`, by one copy that is queued on the current stream.

    NOTE: only a copy from pinned memory does not make the host wait, and each of `torch.tensor(..., device=device)`
    waits for all that is queued. Torch keeps the pinned memory until the copy is done.
    """
    host = torch.empty(
        sum(_aligned(array.nbytes) for array in arrays), dtype=torch.uint8, pin_memory=device.type != "cpu"
    )
    filled, parts, at = host.numpy(), [], 0
    for array in arrays:
        filled[at : at + array.nbytes] = array.view(np.uint8)
        parts.append((slice(at, at + array.nbytes), torch.from_numpy(array).dtype))
        at += _aligned(array.nbytes)
    there = host.to(device, non_blocking=True)
    return [there[part].view(dtype) for part, dtype in parts]


def _aligned(num_bytes: int) -> int:
    """A place behind so many bytes where every dtype may begin."""
    return -(-num_bytes // 8) * 8
