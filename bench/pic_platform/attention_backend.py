"""`pic_cpu`, the attention backend of the platform: SGLang's interface around `attention_ops`.

NOTE: a layer writes the keys of all new tokens to the pool before it reads any, so that the virtual sequences of one
row see each other's keys; the gap prefill rests on that order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    KVWriteLoc,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pic_platform import ATTENTION_BACKEND
from pic_platform.attention_ops import CausalMask, Scoring, attend_chosen, attend_decode, attend_extend
from pic_platform.attention_plan import (
    DecodeGroup,
    ExtendPlan,
    plan_decode,
    plan_draft,
    plan_extend,
    plan_verify,
)
from pic_platform.sparse_index import check_indexer
from sglang_pic.errors import UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuAttentionBackend(AttentionBackend):
    """Causal attention for extend (only the new queries) and decode (batched), GQA and absorbed MLA."""

    def __init__(self, model_runner: ModelRunner) -> None:
        """Take the pools of a loaded model.

        Raises:
            UnsupportedError: This backend lacks something that the model, its KV pool or a flag needs.
        """
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._page_table = self.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._is_latent = check_pool(self.token_to_kv_pool)
        pools = getattr(self.token_to_kv_pool, "layers_mapping", {})
        self._chunk: int | None = model_runner.model_config.attention_chunk_size
        self._in_window_pool = frozenset(layer for layer, (_, is_window) in pools.items() if is_window)
        for name, module in model_runner.model.named_modules():
            if isinstance(module, RadixAttention):
                check_layer(name, module)
            elif "Indexer" in type(module).__name__:
                check_indexer(name, module)
            elif type(module).__name__ == "Llama4Attention" and module.rotary_emb is not None:
                rotate_in_place(module.rotary_emb)
        self._masks: dict[tuple[int, torch.dtype, int | None], CausalMask] = {}
        self._chooses = type(self.token_to_kv_pool) is DSATokenToKVPool
        self._extend: ExtendPlan | None = None
        # The same batch in the slots of the window pool.
        self._window_extend: ExtendPlan | None = None
        self._decode = self._window_decode = _DecodePlans(lambda *_: [])
        self._window_out: torch.Tensor | None = None

    @property
    def extend_plan(self) -> ExtendPlan | None:
        """Where the keys of the batch at hand lie, for an indexer; `None` where the batch has no sequence."""
        return self._extend

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Look up the batch's slots once for all layers."""
        mode = forward_batch.forward_mode
        rows = forward_batch.req_pool_indices
        self._extend = None
        if mode.is_idle():
            return
        if mode.is_decode() and self._chooses:
            self._extend = self._plan_chain(forward_batch, -1, 1)
        elif mode.is_decode():
            self._decode = _DecodePlans(partial(plan_decode, self._page_table, rows, forward_batch.seq_lens))
        elif mode.is_target_verify() and self._chooses:
            self._extend = self._plan_chain(forward_batch, 0, forward_batch.spec_info.draft_token_num)
        elif mode.is_target_verify():
            tree = forward_batch.spec_info
            self._extend = plan_verify(
                self._page_table, rows, forward_batch.seq_lens, tree.draft_token_num, tree.custom_mask
            )
        else:
            self._extend = plan_extend(
                self._page_table, rows, forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
            )
        if self._in_window_pool:
            self._look_up_windows(forward_batch)

    def _look_up_windows(self, forward_batch: ForwardBatch) -> None:
        """The batch's slots in the window pool: those of keys outside every window are the padding slot."""
        look_up, whole, decode = self.token_to_kv_pool.translate_loc_from_full_to_swa, self._extend, self._decode
        self._window_out = look_up(forward_batch.out_cache_loc)
        self._window_extend = None if whole is None else replace(whole, rows=[look_up(slots) for slots in whole.rows])
        self._window_decode = _DecodePlans(
            lambda *reach: [replace(group, slots=look_up(group.slots)) for group in decode.groups(*reach)]
        )

    def _plan_chain(self, forward_batch: ForwardBatch, offset: int, num_tokens: int) -> ExtendPlan:
        """The last tokens of each sequence, the first one `offset` behind its length, as an extend batch.

        NOTE: index keys lie in pages of 64 tokens, and with those SGLang lets drafts go on in one branch only.
        """
        lens = forward_batch.seq_lens
        return plan_extend(
            self._page_table, forward_batch.req_pool_indices, lens + offset, torch.full_like(lens, num_tokens)
        )

    def init_draft_step(self, forward_batch: ForwardBatch, topk: int, num_steps: int, step: int) -> None:
        """Look up the slots of one step of a draft, from 0; see `plan_draft`."""
        self._extend = self._plan_chain(forward_batch, step, 1) if self._chooses else None
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        self._decode = _DecodePlans(partial(plan_draft, self._page_table, rows, seq_lens, topk, num_steps, step))

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Write the new keys, then attend with the new queries only.

        A decode step is the same with one query per sequence; the metadata say which of the two the batch is. `sinks`
        is as in `Scoring`, `topk_indices` the result of `sparse_index.choose_tokens`.

        Returns:
            `[num_queries, num_heads * v_head_dim]`.
        """
        surplus = sorted(name for name, value in kwargs.items() if value is not None)
        if surplus:
            raise UnsupportedError(f"The attention backend {ATTENTION_BACKEND!r} cannot use {', '.join(surplus)}.")
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self._window_out), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = None if self._is_latent else self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        in_window_pool = layer.layer_id in self._in_window_pool
        plan = self._window_extend if in_window_pool else self._extend
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        chunk = self._chunk if layer.use_irope else None
        scoring = Scoring(layer.scaling, window, layer.logit_cap or 0.0, chunk, sinks)
        if plan is None:
            decode = self._window_decode if in_window_pool else self._decode
            attend_decode(query, keys, values, decode.groups(window, chunk), scoring, out)
        else:
            assert plan.num_queries <= query.shape[0], "the batch changed after its metadata was made"
            # Ranks that gather tokens pad theirs.
            out[plan.num_queries :] = 0
            shape = (layer.tp_q_head_num // keys.shape[1], query.dtype, window)
            mask = self._masks.setdefault(shape, CausalMask(*shape))
            if topk_indices is None:
                attend_extend(query, keys, values, plan, mask, scoring, out)
            else:
                attend_chosen(query, keys, topk_indices, plan, mask, scoring, out)
        return out.view(out.shape[0], -1)

    forward_decode = forward_extend

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Keys of a sequence that SGLang pads a batch with, where ranks gather tokens: the one of the padding slot."""
        return 1

    def support_triton(self) -> bool:
        """No Triton kernel is launched here."""
        return False


class _DecodePlans:
    """The decode groups of a batch, looked up once for each reach that a layer asks for."""

    def __init__(self, look_up: Callable[[int | None, int | None], list[DecodeGroup]]) -> None:
        self._look_up = look_up
        self._groups: dict[tuple[int | None, int | None], list[DecodeGroup]] = {}

    def groups(self, window: int | None, chunk: int | None) -> list[DecodeGroup]:
        """The groups of layers with this window and chunks of this length."""
        reach = window, chunk
        if reach not in self._groups:
            self._groups[reach] = self._look_up(*reach)
        return self._groups[reach]


def check_pool(pool: object) -> bool:
    """Whether a KV pool holds latent rows (MLA), not keys and values.

    Raises:
        UnsupportedError: The pool is none of the plain ones, nor one of keys and values with one for windows.
    """
    if type(pool) in (DSATokenToKVPool, MLATokenToKVPool):
        return True
    if isinstance(pool, MiniMaxSparseKVPool):
        # SGLang's backend for its layers with an indexer stands beside this one.
        pool = pool.main_pool
    elif isinstance(pool, HybridLinearKVPool) and type(pool) is HybridLinearKVPool:
        pool = pool.full_kv_pool
    parts = (pool.full_kv_pool, pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else (pool,)
    if all(type(part) is MHATokenToKVPool for part in parts):
        return False
    raise UnsupportedError(
        f"KV pool {type(pool).__name__!r}: the attention backend {ATTENTION_BACKEND!r} serves plain multi-head and "
        "latent pools (no FP4); use a machine with an accelerator."
    )


def rotate_in_place(rotary: Any) -> None:
    """Have a rotary embedding write over its operands, as its kernel does and Llama-4 relies on; idempotent."""

    def turn(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for given, turned in zip((query, key), rotary.forward_native(positions, query, key), strict=True):
            given.copy_(turned.view_as(given))
        return query, key

    rotary._forward_method = turn


def check_layer(name: str, layer: RadixAttention) -> None:
    """Refuse an attention layer that does more than causal attention, in a window and with capped scores at most.

    Raises:
        UnsupportedError: naming the layer and the property.
    """
    for is_used, what in (
        (layer.logit_cap and layer.logit_capping_method != "tanh", f"capping by {layer.logit_capping_method!r}"),
        (layer.is_cross_attention, "cross attention"),
        (layer.attn_type != AttentionType.DECODER, f"attn_type={layer.attn_type!r}"),
        (layer.xai_temperature_len > 0, f"xai_temperature_len={layer.xai_temperature_len!r}"),
        (layer.k_scale is not None, "a scaled KV cache"),
    ):
        if is_used:
            raise UnsupportedError(
                f"Layer {name!r} has {what}: the attention backend {ATTENTION_BACKEND!r} does causal attention only; "
                "try --attention-backend torch_native or a machine with an accelerator."
            )
