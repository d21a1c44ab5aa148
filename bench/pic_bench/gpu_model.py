"""Owns a decoder of given dimensions with random weights, in plain torch, and its paged KV pool with pages of one slot.

It must not know plans, clocks or files. A pass writes a layer's KV into the pool before that layer attends, as SGLang
does, so that a later virtual sequence sees the earlier ones. With a latent there are two ways to the same result:

    absorbed    queries are taken into the latent's space; attention reads the pool's rows as they are
    expanded    the row's keys and values are made from its latents first; a query is then 3.4 times cheaper to attend

SGLang computes prefills with no prefix in the second way, and others in the one or the other, by backend.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from pic_kernels import RopeParams
from torch import Tensor

from pic_bench.gpu_attention import Attend, AttentionBackend, AttentionShape
from pic_bench.gpu_dims import Dims
from pic_bench.gpu_experts import Experts
from pic_bench.gpu_extend import Extend
from sglang_pic.runtime.rope import RopeGeometry
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.views import PoolKind, PoolView

__all__ = ["LatentPath", "Pool", "Skeleton"]

MAX_SHIFT: Final = 1 << 17
# Random queries and keys attend to everything alike, and an answer would hardly depend on what the pool holds. Wider
# queries make attention choose: a score's standard deviation is this.
_QUERY_GAIN: Final = 3.0


class LatentPath(Enum):
    """How a pass with a latent attends."""

    ABSORBED = "absorbed"
    EXPANDED = "expanded"


class Pool:
    """KV rows of all layers, and the splicer that serves them."""

    def __init__(self, dims: Dims, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the pool, poisoned: a row that nobody wrote gives NaN."""

        def rows(dim: int) -> tuple[Tensor, ...]:
            shape = (num_slots, dims.kv_heads, dim)
            return tuple(torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(dims.layers))

        self.keys = rows(dims.row_dim)
        self.values = () if dims.latent else rows(dims.v_dim)
        half = torch.arange(0, dims.rope_dim, 2, dtype=torch.float32)
        rope = RopeParams(dims.rope_theta ** -(half / dims.rope_dim), dims.rope_dim, is_neox_style=not dims.latent)
        self.rope = rope.to(device)
        view = PoolView(
            kind=PoolKind.MLA if dims.latent else PoolKind.MHA,
            keys=self.keys,
            values=self.values,
            dtype=dtype,
            num_slots=num_slots,
            page_size=1,
            rope_offset=dims.latent,
            rope_dim=dims.rope_dim,
            start_layer=0,
        )
        layer_ids = tuple(range(dims.layers))
        self.splicer = Splicer(view, RopeGeometry(layer_ids, (rope,) * dims.layers, MAX_SHIFT))

    def poison(self) -> None:
        """Make every row NaN again."""
        for buffer in (*self.keys, *self.values):
            buffer.fill_(float("nan"))


class _Layer(NamedTuple):
    """Weights as `linear` takes them; norms' gains are 1."""

    qkv: Tensor
    """With a latent: queries, latent and rotary key."""
    out: Tensor
    key_up: Tensor | None
    """`[heads, nope_dim, latent]`."""
    value_up: Tensor | None
    """`[heads, v_dim, latent]`."""
    gate_up: Tensor
    down: Tensor
    experts: Experts | None


class Skeleton:
    """The model. Weights are normal, scaled so that activations keep their size; the same seed gives the same ones."""

    def __init__(self, dims: Dims, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """Draw the weights on `device`."""
        self.dims, self.dtype, self.device = dims, dtype, device
        self._random = torch.Generator(device).manual_seed(seed)
        self.embedding = self._weight(dims.vocab, dims.hidden) * dims.hidden**0.5
        self.head = self._weight(dims.vocab, dims.hidden)
        self.layers = [self._layer(index) for index in range(dims.layers)]

    @property
    def experts_way(self) -> str:
        """How routed experts are computed; empty for a dense model."""
        return next((layer.experts.way for layer in self.layers if layer.experts is not None), "")

    def first_layers(self, count: int) -> Skeleton:
        """The same weights with the first `count` layers only."""
        part = copy.copy(self)
        part.layers = self.layers[:count]
        return part

    @torch.inference_mode()
    def forward(
        self, extend: Extend, pool: Pool, attention: AttentionBackend, path: LatentPath = LatentPath.EXPANDED
    ) -> Tensor:
        """Move the rows of the pass's splice, then compute its tokens.

        Args:
            extend: the pass; its KV is written to `extend.out_slots` of every layer.
            pool: holds the rows before every gap, or gets them from the splice.
            attention: who attends.
            path: only with a latent.

        Returns:
            `[vocab]` float32, the logits of the last token.
        """
        if extend.splice is not None:
            pool.splicer.splice(extend.splice.src, extend.splice.dst, extend.splice.shifts)
        attend = self._plan(extend, attention, path)
        turns = self._cos_sin(extend.positions, pool.rope)
        hidden = F.embedding(extend.input_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(hidden, (self.dims.hidden,))
            if self.dims.latent:
                mixed = self._latent_attention(layer, normed, extend, pool.keys[index], turns, attend, path)
            else:
                mixed = self._attention(layer, normed, extend, (pool.keys[index], pool.values[index]), turns, attend)
            hidden = hidden + F.linear(mixed, layer.out)
            normed = F.rms_norm(hidden, (self.dims.hidden,))
            hidden = hidden + _gated(normed, layer.gate_up, layer.down)
            if layer.experts is not None:
                hidden = hidden + layer.experts(normed)
        return F.linear(F.rms_norm(hidden[-1], (self.dims.hidden,)), self.head).float()

    def _plan(self, extend: Extend, attention: AttentionBackend, path: LatentPath) -> Attend:
        dims = self.dims
        if not dims.latent:
            shape = AttentionShape(dims.heads, dims.kv_heads, dims.qk_dim, dims.v_dim, dims.scale, 0, self.dtype)
            return attention.plan(extend, extend.row, shape)
        if path is LatentPath.ABSORBED:
            shape = AttentionShape(dims.heads, 1, dims.row_dim, dims.latent, dims.scale, dims.latent, self.dtype)
            return attention.plan(extend, extend.row, shape)
        shape = AttentionShape(dims.heads, dims.heads, dims.qk_dim, dims.v_dim, dims.scale, 0, self.dtype)
        return attention.plan(extend, None, shape)

    def _attention(
        self,
        layer: _Layer,
        normed: Tensor,
        extend: Extend,
        pool: tuple[Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        dims, keys, values = self.dims, *pool
        heads = F.linear(normed, layer.qkv).view(len(normed), -1, dims.qk_dim)
        query, key, value = heads.split((dims.heads, dims.kv_heads, dims.kv_heads), dim=1)
        keys[extend.out_slots] = _turn(key, turns, is_neox=True)
        values[extend.out_slots] = value
        return attend(_turn(query, turns, is_neox=True), keys, values).flatten(1)

    def _latent_attention(
        self,
        layer: _Layer,
        normed: Tensor,
        extend: Extend,
        rows: Tensor,
        turns: tuple[Tensor, Tensor],
        attend: Attend,
        path: LatentPath,
    ) -> Tensor:
        dims = self.dims
        assert layer.key_up is not None
        assert layer.value_up is not None
        query, latent, key = F.linear(normed, layer.qkv).split(
            (dims.heads * dims.qk_dim, dims.latent, dims.rope_dim), dim=1
        )
        latent = F.rms_norm(latent, (dims.latent,))
        rows[extend.out_slots] = torch.cat((latent[:, None], _turn(key[:, None], turns, is_neox=False)), dim=2)
        plain, turning = query.view(-1, dims.heads, dims.qk_dim).split((dims.nope_dim, dims.rope_dim), dim=2)
        turning = _turn(turning, turns, is_neox=False)
        if path is LatentPath.ABSORBED:
            taken = torch.bmm(plain.transpose(0, 1), layer.key_up).transpose(0, 1)
            mixed = attend(torch.cat((taken, turning), dim=2), rows, None)
            return torch.bmm(mixed.transpose(0, 1), layer.value_up.transpose(1, 2)).transpose(0, 1).flatten(1)
        latents, turned = rows[extend.row].split((dims.latent, dims.rope_dim), dim=2)
        keys, values = (
            F.linear(latents[:, 0], up.flatten(0, 1)).view(-1, dims.heads, up.shape[1])
            for up in (layer.key_up, layer.value_up)
        )
        keys = torch.cat((keys, turned.expand(-1, dims.heads, -1)), dim=2)
        return attend(torch.cat((plain, turning), dim=2), keys, values).flatten(1)

    def _cos_sin(self, positions: Tensor, rope: RopeParams) -> tuple[Tensor, Tensor]:
        """`[num_tokens, 1, rope_dim / 2]` float32, for every head alike."""
        cos, sin = rope.cos_sin(positions)
        return cos[:, None], sin[:, None]

    def _layer(self, index: int) -> _Layer:
        dims = self.dims
        has_experts = dims.experts > 0 and index >= dims.dense_layers
        ffn = dims.shared_experts * dims.expert_ffn if has_experts else dims.ffn
        # Queries first: they alone are wide.
        queries = self._weight(dims.heads * dims.qk_dim, dims.hidden) * _QUERY_GAIN
        others = dims.row_dim if dims.latent else dims.kv_heads * (dims.qk_dim + dims.v_dim)
        return _Layer(
            qkv=torch.cat((queries, self._weight(others, dims.hidden))),
            out=self._weight(dims.hidden, dims.heads * dims.v_dim),
            key_up=self._weight(dims.heads, dims.nope_dim, dims.latent) if dims.latent else None,
            value_up=self._weight(dims.heads, dims.v_dim, dims.latent) if dims.latent else None,
            gate_up=self._weight(2 * ffn, dims.hidden),
            down=self._weight(dims.hidden, ffn),
            experts=self._experts() if has_experts else None,
        )

    def _experts(self) -> Experts:
        dims = self.dims
        return Experts(
            router=self._weight(dims.experts, dims.hidden),
            gate_up=self._weight(dims.experts, 2 * dims.expert_ffn, dims.hidden),
            down=self._weight(dims.experts, dims.hidden, dims.expert_ffn),
            top_k=dims.top_k,
        )

    def _weight(self, *shape: int) -> Tensor:
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        return weight.normal_(std=shape[-1] ** -0.5, generator=self._random)


def _gated(hidden: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(hidden, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _turn(heads: Tensor, turns: tuple[Tensor, Tensor], *, is_neox: bool) -> Tensor:
    """`heads` `[num_tokens, num_heads, rope_dim]` turned to their positions, in float32, rounded once."""
    cos, sin = turns
    wide = heads.float()
    if is_neox:
        a, b = wide.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(heads.dtype)
    a, b = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(heads.dtype)
