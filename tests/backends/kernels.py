"""Plain torch in the place of the compiled attention kernels, each with the arguments of the one that it stands for.

Each reads exactly what it is told: the page table, the lengths and the offsets that SGLang's backend made. An argument
that would change the result and is not computed here raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor


class Scoring(NamedTuple):
    """What a softmax is over, beside scaled products."""

    window: int = -1
    """Keys before its own that a query sees; -1 for all."""
    cap: float = 0.0
    """Scores `s` become `cap * tanh(s / cap)`; 0 leaves them."""
    sinks: Tensor | None = None
    """Per head, a score more that has no value."""


PLAIN: Final = Scoring()


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool, scoring: Scoring = PLAIN
) -> Tensor:
    """Attention of one sequence in float64; the causal mask is aligned to the lower right, as in every kernel here.

    Query `[num_queries, heads, key_dim]`, keys and values `[num_keys, kv_heads, dim]`; a window counts from a query's
    last key. Returns `[num_queries, heads, value_dim]` in the query's dtype.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if scoring.cap:
        scores = scoring.cap * (scores / scoring.cap).tanh()
    first = len(keys) - len(query)
    distance = torch.arange(first, first + len(query))[:, None] - torch.arange(len(keys))[None, :]
    if causal:
        scores.masked_fill_(distance < 0, float("-inf"))
    if scoring.window >= 0:
        scores.masked_fill_(distance > scoring.window, float("-inf"))
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    shares = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", shares, values).to(query.dtype)


def attend_each(
    query: Tensor,
    sequences: Iterable[tuple[slice, Tensor, Tensor]],
    scale: float,
    *,
    into: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`attend` for sequences, each its queries, keys and values; a query of none is NaN, one without keys 0."""
    out: Tensor | None = None
    for span, keys, values in sequences:
        if out is None:
            out = query.new_full((*query.shape[:2], values.shape[-1]), float("nan"))
        out[span] = attend(query[span], keys, values, scale, **options) if len(keys) else 0.0
    assert out is not None, "a batch has sequences"
    return out if into is None else into.copy_(out)


def refuse(**options: object) -> None:
    """Raise for an argument that is set and not computed here."""
    given = [name for name, value in options.items() if value not in (None, False, 0, 1.0, -1, (-1, -1))]
    if given:
        raise NotImplementedError(f"the reference kernel cannot compute {', '.join(given)}")


def _int32(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise TypeError(f"{name} must be int32 and contiguous in its last dimension, is {tensor.dtype}")


def _spans(offsets: Tensor) -> Iterator[slice]:
    return (slice(start, end) for start, end in itertools.pairwise(offsets.tolist()))


def _paged(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first rows of one sequence out of `[pages, page_size, heads, dim]`."""
    num_pages = -(-length // cache.shape[1])
    return cache[table[:num_pages].long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *positional: Any, **named: Any) -> Tensor:
    """`sgl_kernel.flash_attn.flash_attn_with_kvcache` over a paged cache that has all keys already.

    With `qv` the query and the key are in two parts, the second of which is also the value (MLA).
    """
    given = dict(zip(_names_behind_the_caches(), positional, strict=False)) | named
    # These change how the kernel works, not what it computes; it reads `cu_seqlens_k_new` for new keys only.
    for name in (*_HOW, "scheduler_metadata", "cu_seqlens_k_new", "max_seqlen_k", "rotary_interleaved"):
        given.pop(name, None)
    left, right = given.pop("window_size", (-1, -1))
    refuse(window_to_the_right=right)
    scoring = Scoring(left, given.pop("softcap", None) or 0.0, given.pop("sinks", None))
    table, lengths, offsets = (given.pop(name) for name in ("page_table", "cache_seqlens", "cu_seqlens_q"))
    qv, longest, out = (given.pop(name, None) for name in ("qv", "max_seqlen_q", "out"))
    scale, causal = given.pop("softmax_scale"), given.pop("causal", False)
    refuse(**given)
    _int32(page_table=table, cache_seqlens=lengths, cu_seqlens_q=offsets)

    def sequences() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for pages, length, span in zip(table, lengths.tolist(), _spans(offsets), strict=True):
            if longest is not None and span.stop - span.start > longest:
                raise ValueError(f"a sequence of {span.stop - span.start} queries, but max_seqlen_q={longest}")
            keys, values = _paged(k_cache, pages, length), _paged(v_cache, pages, length)
            yield span, keys if qv is None else torch.cat([keys, values], dim=-1), values

    query = q if qv is None else torch.cat([q, qv], dim=-1)
    return attend_each(query, sequences(), scale, into=out, causal=causal, scoring=scoring)


# Of how a kernel works, not of what it computes.
_HOW: Final = ("num_splits", "pack_gqa", "sm_margin")
_STORED: Final = ("q_data_type", "kv_data_type", "non_blocking")


@cache
def _names_behind_the_caches() -> list[str]:
    """SGLang passes some arguments by position, in the order in which it takes them itself."""
    ours = import_module("sglang.kernels.ops.attention.flash_attention_v3").flash_attn_with_kvcache
    return [*signature(ours).parameters][3:]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    out: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """`sgl_kernel.flash_attn.flash_attn_varlen_func`: keys and values are given, not cached."""
    refuse(**{name: value for name, value in others.items() if name not in _HOW})
    _int32(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    # Keys and values follow one another, as their queries do.
    spans = zip(_spans(cu_seqlens_q), _spans(cu_seqlens_k), strict=True)
    return attend_each(q, ((span, k[at], v[at]) for span, at in spans), scale, into=out, causal=causal)


class Wrapper:
    """What the wrappers of FlashInfer have in common: `plan` keeps what `run` reads.

    It stands for `flashinfer.BatchPrefillWithRaggedKVCacheWrapper`, which no gap batch may use.
    """

    is_cuda_graph_enabled = False

    def __init__(self, *_: object, **__: object) -> None:
        self._plan: dict[str, Tensor] = {}

    def _keep(self, **tensors: Tensor) -> None:
        _int32(**tensors)
        # FlashInfer copies them, and SGLang overwrites its buffers for the next batch.
        self._plan = {name: tensor.clone() for name, tensor in tensors.items()}

    _window = -1

    def _scoring(self, options: dict[str, Any]) -> Scoring:
        """Of a call; a window is planned, and told again."""
        told = options.pop("window_left", self._window)
        if told != self._window:
            raise ValueError(f"planned for window_left={self._window}, called with {told}")
        return Scoring(told, options.pop("logits_soft_cap", None) or 0.0)

    def _rows(self, i: int) -> Tensor:
        """The slots of a sequence's keys."""
        span = slice(*self._plan["kv_indptr"][i : i + 2].tolist())
        return self._plan["kv_indices"][span].long()


class PagedPrefill(Wrapper):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`; SGLang plans pages of one token."""

    def begin_forward(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        *sizes: int,
        **others: Any,
    ) -> None:
        self._window = others.pop("window_left", -1)
        refuse(**{name: value for name, value in others.items() if name not in _STORED})
        *_, page_size = sizes
        assert page_size == 1
        assert (last_page_len == 1).all()
        assert len(last_page_len) == len(qo_indptr) - 1
        self._keep(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices)

    def forward(self, q: Tensor, kv: Any, causal: bool = True, sm_scale: float | None = None, **others: Any) -> Tensor:
        scoring = self._scoring(others)
        refuse(**others)
        rows = ((span, self._rows(i)) for i, span in enumerate(_spans(self._plan["qo_indptr"])))
        sequences = ((span, kv[0][slots], kv[1][slots]) for span, slots in rows)
        scale = sm_scale if sm_scale is not None else q.shape[-1] ** -0.5
        return attend_each(q, sequences, scale, causal=causal, scoring=scoring)


class PagedDecode(PagedPrefill):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`: a query a sequence."""

    def begin_forward(self, kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor, *_: Any, **__: Any) -> None:
        offsets = torch.arange(len(kv_indptr), dtype=torch.int32)
        super().begin_forward(offsets, kv_indptr, kv_indices, last_page_len, 1)

    def forward(self, q: Tensor, kv: Any, sm_scale: float, **others: Any) -> Tensor:
        return super().forward(q, kv, causal=False, sm_scale=sm_scale, **others)


class PagedMla(Wrapper):
    """`flashinfer.BatchMLAPagedAttentionWrapper`."""

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, *sizes: Any) -> None:
        _heads, _latent, _rotary, page_size, self._causal, self._scale, *_dtypes = sizes
        assert page_size == 1
        assert (kv_indptr[1:] - kv_indptr[:-1]).tolist() == kv_len_arr.tolist()
        self._keep(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices)

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, out: Tensor, return_lse: bool = False
    ) -> Tensor:
        """Attention over the latent rows, which are their own values."""
        refuse(return_lse=return_lse)
        rows = ((span, self._rows(i)) for i, span in enumerate(_spans(self._plan["qo_indptr"])))
        sequences = ((span, torch.cat([ckv[slots], kpe[slots]], dim=-1), ckv[slots]) for span, slots in rows)
        query = torch.cat([q_nope, q_pe], dim=-1)
        return attend_each(query, sequences, self._scale, into=out, causal=self._causal)


def trtllm_context(
    *,
    batch_size: int,
    seq_lens: Tensor,
    max_q_len: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    causal: bool = True,
    **options: Any,
) -> Tensor:
    """`flashinfer.prefill.trtllm_batch_context_with_kv_cache`."""
    if batch_size != len(seq_lens) or (cum_seq_lens_kv[1:] - cum_seq_lens_kv[:-1]).tolist() != seq_lens.tolist():
        raise ValueError("the lengths of the keys do not agree")
    return _trtllm(seq_lens, cum_seq_lens_q, max_q_len, options.pop("max_kv_len"), causal=causal, **options)


def trtllm_decode(*, seq_lens: Tensor, max_seq_len: int, **options: Any) -> Tensor:
    """`flashinfer.decode.trtllm_batch_decode_with_kv_cache`: one query a sequence."""
    options.pop("multi_ctas_kv_counter_buffer", None)
    offsets = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    return _trtllm(seq_lens, offsets, 1, max_seq_len, causal=True, **options)


def _trtllm(
    seq_lens: Tensor, offsets: Tensor, max_q_len: int, max_kv_len: int, *, query: Tensor, kv_cache: Any, **options: Any
) -> Tensor:
    """Over pages of `[heads, page_size, dim]`; a `bmm2_scale` would scale the values."""
    if int(seq_lens.max()) > max_kv_len:
        raise ValueError(f"{int(seq_lens.max())} keys, but max_kv_len={max_kv_len}")
    for name in ("workspace_buffer", "out_dtype"):
        options.pop(name, None)
    window = {"window_size": (options.pop("window_left", -1), -1)}
    named = {"page_table": options.pop("block_tables"), "softmax_scale": options.pop("bmm1_scale")}
    lens = {"cache_seqlens": seq_lens, "cu_seqlens_q": offsets, "max_seqlen_q": max_q_len}
    keys, values = (cache.transpose(1, 2) for cache in kv_cache)
    return flash_attn_with_kvcache(query, keys, values, **lens, **named, **window, **options)


FLASHINFER = SimpleNamespace(
    prefill=SimpleNamespace(trtllm_batch_context_with_kv_cache=trtllm_context),
    decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=trtllm_decode),
    utils=SimpleNamespace(
        get_device_sm_count=lambda device: 148,
        get_trtllm_gen_multi_ctas_kv_counter_bytes=lambda batch_size, heads, sm_count: 4 * batch_size * heads,
    ),
)
"""What `trtllm_mha` uses of the module `flashinfer`."""
