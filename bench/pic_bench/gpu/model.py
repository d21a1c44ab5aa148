"""A decoder of given dimensions with random weights, in plain torch: attention over a paged KV pool, the layers.

An attention backend lays a pass out once (`plan`) and then attends in every layer (`Attend`). A pass writes a layer's
KV into the pool before that layer attends, as SGLang does, so that a later virtual sequence sees the earlier ones. With
a latent, attention behind a prefix is absorbed, as in SGLang's captured prefills: queries are taken into the latent's
space and read the pool's rows as they are. A full prefill is expanded, as SGLang's are: keys and values of every head
are made from the latents, and a query is 3.4 times cheaper to attend. RoPE is plain: YaRN and llama3 scaling change
frequencies, not work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from pic_kernels.reference.rotate import turn
from torch import Tensor

from pic_bench.gpu.kernel_pool import Pool, Shape
from sglang_pic.adapter.serve.gap_batch import Splice
from sglang_pic.core import Tokens
from sglang_pic.errors import BenchError


class Extend(NamedTuple):
    """One request's pass, over virtual sequences that share a row of slots."""

    input_ids: Tensor
    """`[num_tokens]` int64, the computed tokens, in order; likewise their positions."""
    positions: Tensor
    row: Tensor
    """`[end]` int64, the slots of the whole prompt."""
    out_slots: Tensor
    """`[num_tokens]` int64, where the KV of the computed tokens goes."""
    prefix_lens: list[int]
    """Per virtual sequence, tokens of the row before its first; `seq_lens` up to and with its last."""
    seq_lens: list[int]
    splice: Splice | None = None
    """Rows to move before the pass."""

    @property
    def is_full(self) -> bool:
        """Whether nothing was computed before."""
        return self.prefix_lens == [0]


class AttentionShape(NamedTuple):
    """The dimensions of a layer; `latent` is 0 where values have a buffer of their own, else as `v_dim`."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    latent: int
    scale: float
    dtype: torch.dtype


Attend = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`attend(query, keys, values)` of one layer.

Query `[num_tokens, heads, qk_dim]`, keys `[num_slots, kv_heads, qk_dim]`, values `[num_slots, kv_heads, v_dim]` or None
where they are the first `v_dim` dimensions of the keys; all contiguous. Returns `[num_tokens, heads, v_dim]`.
"""


class AttentionBackend(NamedTuple):
    """Causal attention of virtual sequences over one row."""

    name: str
    plan: Callable[[Extend, Tensor, AttentionShape], Attend]
    """`plan(extend, slots, shape)` lays a pass out; the keys of position `p` lie in slot `slots[p]`.

    Raises `UnsupportedError` for a shape that the backend does not cover."""


def _plan(extend: Extend, slots: Tensor, shape: AttentionShape) -> Attend:
    """Gather the row, then `scaled_dot_product_attention` of one sequence after the other, with a mask."""
    sizes = [end - start for start, end in zip(extend.prefix_lens, extend.seq_lens, strict=True)]

    def attend(query: Tensor, keys: Tensor, values: Tensor | None) -> Tensor:
        row_keys = keys[slots]
        row_values = row_keys[..., : shape.v_dim] if values is None else values[slots]
        parts = zip(query.split(sizes), extend.seq_lens, strict=True)
        return torch.cat([_attend(queries, row_keys[:end], row_values[:end], shape) for queries, end in parts])

    return attend


def _attend(query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
    """Queries that are the last ones of their keys."""
    later = len(keys) - len(query)
    seen = torch.ones(len(query), len(keys), dtype=torch.bool, device=query.device).tril(later) if later else None
    q, k, v = (part.transpose(0, 1)[None] for part in (query, keys, values))
    result = F.scaled_dot_product_attention(
        q, k, v, seen, is_causal=not later, scale=shape.scale, enable_gqa=shape.kv_heads != shape.heads
    )
    return result[0].transpose(0, 1)


TORCH: Final = AttentionBackend("torch", _plan)


# Random queries and keys attend to everything alike, and an answer would hardly depend on the rows of the pool. Wider
# queries make attention choose: a score's standard deviation is this.
_QUERY_GAIN: Final = 3.0


class Dims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A decoder with grouped-query attention, or with a latent where `latent` is not 0; in JSON as in `config.json`."""

    layers: int = msgspec.field(name="num_hidden_layers")
    hidden: int = msgspec.field(name="hidden_size")
    heads: int = msgspec.field(name="num_attention_heads")
    num_key_value_heads: int
    vocab: int = msgspec.field(name="vocab_size")
    ffn: int = msgspec.field(name="intermediate_size")
    rope_theta: float
    head_dim: int = 0
    """Of queries, keys and values, all of which turns; 0 with a latent, where each part has its own."""
    nope_dim: int = msgspec.field(default=0, name="qk_nope_head_dim")
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    latent: int = msgspec.field(default=0, name="kv_lora_rank")
    experts: int = msgspec.field(default=0, name="n_routed_experts")
    """Routed experts of every layer but the first `dense_layers`; 0 for a dense model."""
    top_k: int = msgspec.field(default=0, name="num_experts_per_tok")
    shared_experts: int = msgspec.field(default=0, name="n_shared_experts")
    expert_ffn: int = msgspec.field(default=0, name="moe_intermediate_size")
    dense_layers: int = msgspec.field(default=0, name="first_k_dense_replace")

    @property
    def kv_heads(self) -> int:
        """Key heads of the pool."""
        return 1 if self.latent else self.num_key_value_heads

    @property
    def rope_dim(self) -> int:
        """Dimensions of a query and key that turn."""
        return self.head_dim or self.qk_rope_head_dim

    @property
    def v_dim(self) -> int:
        """Dimensions of a value head."""
        return self.head_dim or self.v_head_dim

    @property
    def qk_dim(self) -> int:
        """Dimensions of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def rows(self) -> Shape:
        """Of the pool."""
        return Shape(
            layers=self.layers,
            heads=self.kv_heads,
            dim=self.latent + self.rope_dim if self.latent else self.qk_dim,
            rotary_dim=self.rope_dim,
            is_neox=not self.latent,
            latent=self.latent,
            rope_theta=self.rope_theta,
        )

    def attention(self, dtype: torch.dtype, *, is_absorbed: bool) -> AttentionShape:
        """What a pass asks of an attention backend."""
        scale = self.qk_dim**-0.5
        if is_absorbed:
            return AttentionShape(self.heads, 1, self.rows.dim, self.latent, self.latent, scale, dtype)
        kv_heads = self.heads if self.latent else self.kv_heads
        return AttentionShape(self.heads, kv_heads, self.qk_dim, self.v_dim, 0, scale, dtype)

    def attentions(self, dtype: torch.dtype) -> set[AttentionShape]:
        """All that passes ask of an attention backend."""
        return {self.attention(dtype, is_absorbed=is_absorbed) for is_absorbed in (False, self.latent > 0)}


MODELS: Final = msgspec.json.decode(Path(__file__).with_name("models.json").read_bytes(), type=dict[str, Dims])
DRY_MODELS: Final = {"DeepSeek-V2-Lite": "tiny-mla-dims", "Llama-3.1-8B": "tiny-gqa-dims"}
"""What a dry run takes in their place."""

Layer: TypeAlias = dict[str, Tensor]
"""Weights by name, as `linear` takes them; norms' gains are 1."""


class _Pass(NamedTuple):
    """What every layer of a pass shares."""

    extend: Extend
    attend: Attend
    angles: tuple[Tensor, Tensor]
    is_neox: bool

    def turn(self, heads: Tensor) -> Tensor:
        """`[num_tokens, num_heads, rope_dim]` turned to the tokens' positions, in float32, rounded once."""
        return turn(heads.float(), *self.angles, is_neox=self.is_neox).to(heads.dtype)


class Bench:
    """A model, its pool and who attends.

    Weights are normal, scaled so that activations keep their size, and always the same. `slots` `[n]` are in random
    order, as a pool's are after a while.
    """

    def __init__(
        self, name: str, attention: AttentionBackend, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Draw the weights of the dimensions called `name` and allocate the pool."""
        dims = MODELS[name]
        self.name, self.dims, self.attention, self.dtype, self.device = name, dims, attention, dtype, device
        self._random = torch.Generator(device).manual_seed(1)
        self.embedding = self._weight(dims.vocab, dims.hidden) * dims.hidden**0.5
        self.head = self._weight(dims.vocab, dims.hidden)
        self.layers = [self._layer(index) for index in range(dims.layers)]
        self.pool = Pool(dims.rows, dims.layers, num_slots, device, dtype)
        self.slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1)).to(device)

    def to_device(self, tokens: Tokens) -> Tensor:
        """Token ids as a pass takes them."""
        return torch.from_numpy(tokens.astype(np.int64)).to(self.device)

    def first_token(self, extend: Extend) -> int:
        """The greedy token behind a pass; back when the device is done.

        Raises:
            BenchError: the logits are not finite: a row was read that nobody wrote.
        """
        logits = self.forward(extend)
        best = logits.argmax()
        if not bool(torch.isfinite(logits[best])):
            raise BenchError(f"{self.name}, {self.attention.name}: logits are not finite; a row was read unwritten.")
        return int(best)

    @torch.inference_mode()
    def forward(self, extend: Extend) -> Tensor:
        """Move the rows of a pass's splice, then compute its tokens; their KV goes to its `out_slots` of every layer.

        Returns:
            `[vocab]` float32, the logits of the last token.
        """
        pool = self.pool
        if extend.splice is not None:
            pool.splice(extend.splice.src, extend.splice.dst, extend.splice.shifts)
        is_latent = self.dims.latent > 0
        slots = torch.arange(len(extend.row), device=self.device) if is_latent and extend.is_full else extend.row
        shape = self.dims.attention(self.dtype, is_absorbed=is_latent and not extend.is_full)
        attend = self.attention.plan(extend, slots, shape)
        cos, sin = (table[:, None] for table in pool.rope.cos_sin(extend.positions))
        shared = _Pass(extend, attend, (cos, sin), pool.rope.is_neox_style)
        hidden = F.embedding(extend.input_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(hidden, (self.dims.hidden,))
            if self.dims.latent:
                mixed = self._latent_attention(layer, normed, pool.keys[index], shared)
            else:
                mixed = self._attention(layer, normed, pool.keys[index], pool.values[index], shared)
            hidden = hidden + F.linear(mixed, layer["out"])
            normed = F.rms_norm(hidden, (self.dims.hidden,))
            gate, up = F.linear(normed, layer["gate_up"]).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer["down"])
            if "router" in layer:
                hidden = hidden + routed(normed, layer, self.dims.top_k)
        return F.linear(F.rms_norm(hidden[-1], (self.dims.hidden,)), self.head).float()

    def _attention(self, layer: Layer, normed: Tensor, keys: Tensor, values: Tensor, shared: _Pass) -> Tensor:
        dims, out_slots = self.dims, shared.extend.out_slots
        heads = F.linear(normed, layer["qkv"]).view(len(normed), -1, dims.qk_dim)
        query, key, value = heads.split((dims.heads, dims.kv_heads, dims.kv_heads), dim=1)
        keys[out_slots], values[out_slots] = shared.turn(key), value
        return shared.attend(shared.turn(query), keys, values).flatten(1)

    def _latent_attention(self, layer: Layer, normed: Tensor, rows: Tensor, shared: _Pass) -> Tensor:
        dims, key_up, value_up = self.dims, layer["key_up"], layer["value_up"]
        query, latent, key = F.linear(normed, layer["qkv"]).split(
            (dims.heads * dims.qk_dim, dims.latent, dims.rope_dim), dim=1
        )
        latent, key = F.rms_norm(latent, (dims.latent,)), shared.turn(key[:, None])
        rows[shared.extend.out_slots] = torch.cat((latent[:, None], key), dim=2)
        plain, turning = query.view(-1, dims.heads, dims.qk_dim).split((dims.nope_dim, dims.rope_dim), dim=2)
        turning = shared.turn(turning)
        if not shared.extend.is_full:
            taken = torch.einsum("thn,hnl->thl", plain, key_up)
            mixed = shared.attend(torch.cat((taken, turning), dim=2), rows, None)
            return torch.einsum("thl,hvl->thv", mixed, value_up).flatten(1)
        keys, values = (F.linear(latent, up.flatten(0, 1)).unflatten(1, up.shape[:2]) for up in (key_up, value_up))
        keys = torch.cat((keys, key.expand(-1, dims.heads, -1)), dim=2)
        return shared.attend(torch.cat((plain, turning), dim=2), keys, values).flatten(1)

    def _layer(self, index: int) -> Layer:
        dims = self.dims
        has_experts = dims.experts > 0 and index >= dims.dense_layers
        ffn = dims.shared_experts * dims.expert_ffn if has_experts else dims.ffn
        num_queries = dims.heads * dims.qk_dim
        # Behind the queries keys and values, or latent and rotary key.
        others = dims.rows.dim if dims.latent else dims.kv_heads * (dims.qk_dim + dims.v_dim)
        shapes: dict[str, tuple[int, ...]] = {
            "qkv": (num_queries + others, dims.hidden),
            "out": (dims.hidden, dims.heads * dims.v_dim),
            "gate_up": (2 * ffn, dims.hidden),
            "down": (dims.hidden, ffn),
        }
        if dims.latent:
            shapes["key_up"] = (dims.heads, dims.nope_dim, dims.latent)
            shapes["value_up"] = (dims.heads, dims.v_dim, dims.latent)
        if has_experts:
            shapes["router"] = (dims.experts, dims.hidden)
            shapes["experts_gate_up"] = (dims.experts, 2 * dims.expert_ffn, dims.hidden)
            shapes["experts_down"] = (dims.experts, dims.hidden, dims.expert_ffn)
        layer = {name: self._weight(*shape) for name, shape in shapes.items()}
        layer["qkv"][:num_queries] *= _QUERY_GAIN
        return layer

    def _weight(self, *shape: int) -> Tensor:
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        return weight.normal_(std=shape[-1] ** -0.5, generator=self._random)


def routed(hidden: Tensor, layer: Layer, top_k: int) -> Tensor:
    """Each token through its `top_k` experts, weighted by the router: grouped products over tokens sorted by expert."""
    router, gate_up, down = (layer[name] for name in ("router", "experts_gate_up", "experts_down"))
    weights, chosen = F.linear(hidden, router).float().softmax(dim=-1).topk(top_k, dim=-1)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(router), dtype=torch.int32, device=hidden.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    tokens = order // top_k
    gate, up = F.grouped_mm(hidden[tokens], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    result = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    result = result * weights.flatten()[order, None].to(result.dtype)
    return torch.zeros_like(hidden).index_add_(0, tokens, result)
