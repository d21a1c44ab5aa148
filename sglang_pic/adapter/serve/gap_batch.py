"""Gap prefill: one forward pass over the gaps of all requests of a batch.

Every gap `[a, b)` becomes a *virtual sequence* with its request's own row, `extend_prefix_len = a`,
`extend_seq_len = b - a`, `seq_len = b`. A layer writes its KV into the pool before attention reads the row, so a later
gap sees the earlier gaps of that layer and the spliced runs between them: one pass gives the causal result.

    tokens of one request
    [0, P)      prefix hit        owned by the tree
    [P, a)      gap               computed: virtual sequence 0
    [a, b)      run               spliced before the pass
    [b, end)    gap               computed: virtual sequence 1, its last token gives the logits

Nothing here waits for the device: one copy moves the layout's numbers there, and the rest is derived there.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from sglang_pic.adapter.probe.copies import to_device
from sglang_pic.adapter.serve.rows import ON_DEVICE, Placed, Reads, RowTier
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.adapter.sglang.seams import ForwardBatch, ModelRunner, Req, RunnerOutput
from sglang_pic.core import Span, merge_spans

_C = TypeVar("_C")


class _Columns(NamedTuple, Generic[_C]):
    """The numbers of a gap batch that are copied to the device."""

    owners: _C
    """Per virtual sequence, as in `GapBatch`; likewise the next two."""
    prefix_lens: _C
    seq_lens: _C
    lens: _C
    """Per virtual sequence its tokens, its start in the flat extend, and its start in the narrowed one."""
    firsts: _C
    places: _C
    run_lens: _C
    """Per piece, its tokens and the positions by which its keys are rotated."""
    shifts: _C
    computed_lens: _C
    """Per request."""


@dataclass(slots=True)
class GapBatch:
    """The layout that narrows a batch to its gaps, and returns to requests for the logits."""

    reads: Reads
    """The rows to copy before the pass."""
    owners: list[int]
    """Per virtual sequence, the index of its request in the batch."""
    prefix_lens: list[int]
    seq_lens: list[int]
    kept: torch.Tensor
    """Indices of the computed tokens in the flat extend, `[num_computed]`, int64, on the model's device."""
    wide: _Columns[torch.Tensor]
    """On the model's device, int64."""
    narrow: _Columns[torch.Tensor]
    """The same in int32."""
    computed_lens: list[int]
    """Per request, its computed tokens."""
    start_lens: list[int]
    """Per request, `extend_logprob_start_len` counted in computed tokens."""
    extends: Sequence[Extend]
    """Per request."""
    locks: ExitStack = field(default_factory=ExitStack)
    """Locks on the donors' rows; closed when the splice is queued."""
    asking: Sequence[Asking] = ()
    """The requests of which a second pass computes more."""

    def second(self, chosen: Sequence[int]) -> GapBatch:
        """The layout of the second pass: for each of `asking` one of its spans, by number, and the last gap again.

        SGLang wants logits of the other requests, too: what these need is computed again.
        """
        gaps = [[(min(each.prefix_len + each.start_len, each.end - 1), each.end)] for each in self.extends]
        for asks, number in zip(self.asking, chosen, strict=True):
            gaps[asks.owner] = merge_spans([asks.spans[number], asks.last])
        return _lay_out(gaps, self.extends, self.kept.device)

    @contextmanager
    def narrowed(
        self, forward_batch: ForwardBatch, model_runner: ModelRunner, more: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Rewrite `forward_batch` to the virtual sequences, and restore it at the end, also after an error.

        Args:
            forward_batch: SGLang's batch.
            model_runner: computes it.
            more: values of further fields, or of fields that would get others.
        """
        replaced = self._narrow_fields(forward_batch) | dict(more or {})
        saved = {name: getattr(forward_batch, name) for name in (*replaced, *_BOUND_FIELDS)}
        try:
            for name, value in replaced.items():
                setattr(forward_batch, name, value)
            translator = model_runner.kv_index_translator
            translator.own_plan(forward_batch).bind(forward_batch, translator)
            if model_runner.lora_manager is not None:
                # Adapters were prepared for the whole extend. A request's computed tokens are contiguous, so its
                # adapter is that of one segment, as the logits step expects it.
                view = self.per_request_view(forward_batch)
                view.batch_size, view.lora_ids = len(self.computed_lens), saved.get("lora_ids")
                model_runner.lora_manager.prepare_lora_batch(view)
            yield
        finally:
            for name, value in saved.items():
                setattr(forward_batch, name, value)
            _note_prompt_ends(forward_batch, model_runner)

    def per_request_view(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """A copy of a narrowed batch for the logits step: lengths by request, in computed tokens."""
        view = copy.copy(forward_batch)
        view.extend_seq_lens = self.narrow.computed_lens
        view.extend_seq_lens_cpu = list(self.computed_lens)
        view.extend_logprob_start_lens_cpu = list(self.start_lens)
        return view

    def _narrow_fields(self, fb: ForwardBatch) -> dict[str, Any]:
        owners = torch.tensor(self.owners, dtype=torch.int64)
        total = self.kept.numel()
        fields: dict[str, Any] = {
            "batch_size": len(self.owners),
            "seq_lens": self.wide.seq_lens,
            "seq_lens_cpu": torch.tensor(self.seq_lens, dtype=torch.int64),
            "seq_lens_sum": sum(self.seq_lens),
            "extend_num_tokens": total,
            "extend_seq_lens": self.narrow.lens,
            "extend_seq_lens_cpu": [end - start for start, end in zip(self.prefix_lens, self.seq_lens, strict=True)],
            "extend_prefix_lens": self.narrow.prefix_lens,
            "extend_prefix_lens_cpu": list(self.prefix_lens),
            "extend_start_loc": self.narrow.places,
            "global_num_token_non_padded_cpu": total,
        }
        for name, index in (
            *((name, self.kept) for name in _BY_TOKEN),
            *((name, self.wide.owners) for name in ("req_pool_indices", "orig_seq_lens")),
            ("req_pool_indices_cpu", owners),
            ("mrope_positions", (slice(None), self.kept)),
        ):
            whole = getattr(fb, name)
            if whole is not None:
                fields[name] = whole[index]
        # The model finds the media of a sequence's tokens here, by its request.
        for name in ("rids", "lora_ids", "mm_inputs"):
            whole = getattr(fb, name)
            if whole is not None:
                fields[name] = [whole[i] for i in self.owners]
        if fb.global_num_token_non_padded is not None:
            fields["global_num_token_non_padded"] = torch.full_like(fb.global_num_token_non_padded, total)
        return fields


class Extend(NamedTuple):
    """The tokens of one request in a batch."""

    prefix_len: int
    """Tokens whose rows it has already."""
    num_tokens: int
    """Of the batch's flat extend."""
    start_len: int
    """`extend_logprob_start_len`."""

    @property
    def end(self) -> int:
        """Its tokens with rows after the pass."""
        return self.prefix_len + self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Asking:
    """A request of which a second pass computes one text: the attention of its last tokens chooses it."""

    owner: int
    """Its index in the batch."""
    number: int
    """Its index among the requests with a splice."""
    at: int
    """Where its tokens end among those of the pass."""
    spans: Sequence[Span]
    """The texts, with their seams."""
    lens: Sequence[int]
    """Their tokens that are spliced."""
    last: Span
    """Its last gap."""
    slots: torch.Tensor
    """Of all its tokens, on the model's device."""


class Pass(NamedTuple):
    """Attached to a `ForwardBatch` between the two hooks."""

    gap: GapBatch | None
    observers: Sequence[Callable[[RunnerOutput], None]] = ()
    spliced: Sequence[Req] = ()
    """The requests that have a splice."""
    is_ahead: bool = False
    """Whether `splice_ahead` has copied the rows and returned the gaps' tokens to the other ranks."""
    replays: bool = False
    """Whether this rank has voted for its captured graph."""
    of_draft: bool = False
    """Whether this is the draft model's pass, whose rows are already copied."""
    is_trial: bool = False
    """Whether this is a pass of start-up: its copies are not counted, and exceptions are raised."""


def _note_prompt_ends(forward_batch: ForwardBatch, model_runner: ModelRunner) -> None:
    """Store the prompts' lengths for models whose answers attend to their whole prompt and a window (Unlimited-OCR).

    SGLang's FlashAttention stores a prompt's length by its row, which all gaps of a request share: any of them may be
    the last to write. Its other backends have no such windows.
    """
    ends = getattr(model_runner.attn_backend, "_pa_swa_prefill_lens", None) if model_runner.prefill_aware_swa else None
    if ends is not None:
        ends[forward_batch.req_pool_indices] = forward_batch.seq_lens.to(ends.dtype)


# `mm_input_embeds` are of a draft's batch.
_BY_TOKEN = ("input_ids", "positions", "out_cache_loc", "mm_token_modalities", "mm_input_embeds")
# Set by `KVLocPlan.bind` on a batch beside `out_cache_loc`.
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
        pending: per request, its splice, whose locks the layout takes over, or `None` if all of it is computed.
        prefix_lens: per request, tokens whose rows it has already.
        extend_lens: per request, tokens of the batch's flat extend.
        start_lens: per request, `extend_logprob_start_len`.
        rows: per request, its row of slots; read for requests with a splice only.
        device: the model's device.

    Raises:
        ValueError: a plan is not of the request's tokens in the batch, or its pieces are not of all its runs.
    """
    extends = [Extend(*each) for each in zip(prefix_lens, extend_lens, start_lens, strict=True)]
    gaps, placed, asking = list[Sequence[Span]](), list[Placed](), list[Asking]()
    locks, tier, number, at = ExitStack(), ON_DEVICE, 0, 0
    for i, (splice, extend) in enumerate(zip(pending, extends, strict=True)):
        if splice is None:
            gaps.append([(extend.prefix_len, extend.end)])
            at += extend.num_tokens
            continue
        _check(splice, extend.prefix_len, extend.end)
        gaps.append(splice.plan.gaps)
        at += splice.plan.num_computed
        placed += [(piece, rows[i][piece.start : piece.end]) for piece in splice.pieces]
        locks.push(splice.locks)
        tier = splice.tier
        if choices := splice.plan.choices:
            spans = [(max(extend.prefix_len, choice.start), choice.end) for choice in choices]
            lens = [choice.num_spliced for choice in choices]
            asking.append(Asking(i, number, at, spans, lens, gaps[-1][-1], rows[i][: extend.end]))
        number += 1
    layout = _lay_out(gaps, extends, device, placed, tier)
    layout.locks, layout.asking = locks, asking
    return layout


def _lay_out(
    gaps: Sequence[Sequence[Span]],
    extends: Sequence[Extend],
    device: torch.device,
    placed: Sequence[Placed] = (),
    tier: RowTier = ON_DEVICE,
) -> GapBatch:
    """The layout of a pass over these gaps of each request, which first reads the pieces."""
    owners, starts, ends, firsts, computed, logprob_starts = (list[int]() for _ in range(6))
    offset = 0
    for i, (spans, extend) in enumerate(zip(gaps, extends, strict=True)):
        owners += [i] * len(spans)
        starts += [start for start, _ in spans]
        ends += [end for _, end in spans]
        firsts += [offset + start - extend.prefix_len for start, _ in spans]
        computed.append(sum(end - start for start, end in spans))
        # Everything from the first wanted logprob on is computed.
        logprob_starts.append(computed[-1] - (extend.num_tokens - extend.start_len))
        assert logprob_starts[-1] >= 0, "a token whose logprob is wanted was spliced"
        offset += extend.num_tokens
    lens = [*map(int.__sub__, ends, starts)]
    placed = sorted(placed, key=lambda each: each[0].place)
    runs = [len(dst) for _, dst in placed], [piece.shift for piece, _ in placed]
    places = [0, *itertools.accumulate(lens[:-1])]
    wide, narrow = _stage(_Columns(owners, starts, ends, lens, firsts, places, *runs, computed), device)
    return GapBatch(
        reads=tier.gather(placed, _per_token(wide.shifts, wide.run_lens, sum(runs[0]))),
        owners=owners,
        prefix_lens=starts,
        seq_lens=ends,
        kept=_kept(wide, sum(computed)),
        wide=wide,
        narrow=narrow,
        computed_lens=computed,
        start_lens=logprob_starts,
        extends=extends,
    )


def _check(splice: PendingSplice, start: int, end: int) -> None:
    plan, found = splice.plan, sum(piece.end - piece.start for piece in splice.pieces)
    if (plan.prefix_len, plan.end) != (start, end):
        raise ValueError(f"a plan of tokens [{plan.prefix_len}, {plan.end}) for a request's [{start}, {end}).")
    if found != plan.num_spliced:
        raise ValueError(f"pieces of {found} tokens for a plan that splices {plan.num_spliced}.")


def _kept(columns: _Columns[torch.Tensor], num_computed: int) -> torch.Tensor:
    moved_by = _per_token(columns.firsts - columns.places, columns.lens, num_computed)
    return moved_by + torch.arange(num_computed, device=moved_by.device)


def _per_token(values: torch.Tensor, lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    # NOTE: without `output_size` torch waits for the device to learn the size of the result of `repeat_interleave`.
    return torch.repeat_interleave(values, lens, output_size=num_tokens)


def _stage(columns: _Columns[list[int]], device: torch.device) -> tuple[_Columns[torch.Tensor], _Columns[torch.Tensor]]:
    """The columns on `device` in int64, and in int32, by one copy that is queued on the current stream."""
    there, lens = to_device([*itertools.chain.from_iterable(columns)], device), [*map(len, columns)]
    return _Columns(*there.split(lens)), _Columns(*there.to(torch.int32).split(lens))
