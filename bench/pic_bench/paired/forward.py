"""A forward pass of Qwen2 and Llama models that computes any positions over rows that anybody computed.

Keys are kept before their rotation, so that a row moves by being copied: its position rotates it. A pass writes the
rows of its positions, layer by layer, and attends to all rows before them, as a gap pass does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from sglang_pic.errors import ConfigError

_FAMILIES = ("qwen2", "llama")

Probe = Callable[[int, Tensor, Tensor], None]
"""`probe(layer, queries [n, heads, dim], keys [rows, KV heads, dim])`, both rotated."""


class _Rope(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str = "default"


class _Config(msgspec.Struct):
    """Of a model's config.json."""

    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_size: int
    rms_norm_eps: float
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None


class _Layer(NamedTuple):
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class Rows:
    """Keys before rotation and values, both `[layers, rows, KV heads, dim]`, and which rows are there."""

    keys: Tensor
    values: Tensor
    is_there: Tensor

    def take(self, donor: Rows, start: int, end: int, donor_start: int) -> None:
        """Copy a donor's rows from `donor_start` on to `[start, end)`."""
        stop = donor_start + end - start
        self.keys[:, start:end] = donor.keys[:, donor_start:stop]
        self.values[:, start:end] = donor.values[:, donor_start:stop]
        self.is_there[start:end] = True

    def first(self, end: int, num: int) -> Rows:
        """A copy of the first `end` rows with room for `num` in all."""
        room = [0] * (2 * (self.keys.dim() - 2)) + [0, num - end]
        keys, values = (functional.pad(each[:, :end], room) for each in (self.keys, self.values))
        return Rows(keys, values, functional.pad(self.is_there[:end], [0, num - end]))


class Forward:
    """A model.

    Args:
        folder: of its configuration and weights.
        dtype: of weights and rows. float32 has less noise of its own than what is measured; bfloat16 is what servers
            have, and takes less than half the time where a CPU multiplies it.

    Raises:
        ConfigError: the model is of another family, or scales its rotation.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
        rope = config.rope_parameters or _Rope()
        if config.model_type not in _FAMILIES or rope.rope_type != "default":
            raise ConfigError(
                f"--model {str(folder)!r}: model_type {config.model_type!r} with rope {rope.rope_type!r}; must be one "
                f"of {', '.join(_FAMILIES)} with an unscaled rotation."
            )
        self.num_layers = config.num_hidden_layers
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = config.head_dim or config.hidden_size // self._heads
        self._eps = config.rms_norm_eps
        theta = config.rope_theta or rope.rope_theta or 10000.0
        self._frequencies = theta ** -(torch.arange(0, self._dim, 2, dtype=torch.float64) / self._dim)
        self._dtype = dtype
        # Products of bfloat16 are summed in float32 either way, and rounded afterwards.
        product = dtype if dtype == torch.float32 else min((dtype, torch.float32), key=_seconds)
        weights = _weights(folder, dtype)
        self._embedding = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        weights = {name: each if "norm" in name else each.to(product) for name, each in weights.items()}
        self._head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        self._layers = [_layer(weights, f"model.layers.{i}.") for i in range(self.num_layers)]

    def rows(self, num: int) -> Rows:
        """Room for so many rows."""
        shape = self.num_layers, num, self._kv_heads, self._dim
        keys, values = (torch.zeros(shape, dtype=self._dtype) for _ in range(2))
        return Rows(keys, values, torch.zeros(num, dtype=torch.bool))

    @torch.inference_mode()
    def compute(self, ids: Tensor, at: Tensor, rows: Rows, *, probe: Probe | None = None) -> Tensor:
        """Compute rows in one pass.

        Args:
            ids: of the tokens to compute, `[n]`.
            at: their positions, ascending, `[n]`.
            rows: all rows so far; those at `at` are written.
            probe: called in every layer.

        Returns:
            The last hidden states, normalised, `[n, hidden]`.
        """
        end = int(at[-1]) + 1
        rows.is_there[at] = True
        places = torch.arange(end)
        mask = (places[None] <= at[:, None]) & rows.is_there[None, :end]
        is_whole = len(at) == end
        hidden = self._embedding[ids]
        for number, layer in enumerate(self._layers):
            qkv = _product(self._rms(hidden, layer.norm), layer.qkv, layer.qkv_bias)
            query, key, value = qkv.view(len(at), -1, self._dim).split((self._heads, self._kv_heads, self._kv_heads), 1)
            rows.keys[number, at], rows.values[number, at] = key, value
            query, keys = self.rotated(query, at), self.rotated(rows.keys[number, :end], places)
            if probe is not None:
                probe(number, query, keys)
            query, keys, values = (
                each.transpose(0, 1)[None].to(layer.out.dtype) for each in (query, keys, rows.values[number, :end])
            )
            attended = functional.scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=None if is_whole else mask,
                is_causal=is_whole,
                enable_gqa=True,
            )
            hidden = hidden + _product(attended[0].transpose(0, 1).flatten(1).to(hidden.dtype), layer.out)
            gate, up = _product(self._rms(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            hidden = hidden + _product(functional.silu(gate) * up, layer.down)
        return self._rms(hidden, self._norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, vocabulary]`, in float32."""
        return _product(hidden, self._head).float()

    def rotated(self, rows: Tensor, at: Tensor) -> Tensor:
        """Keys or queries `[n, heads, dim]` at their positions, which may be negative; halves are pairs."""
        angles = (at.double()[:, None] * self._frequencies).float()[:, None]
        cos, sin = angles.cos(), angles.sin()
        first, second = rows.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(rows.dtype)

    def _rms(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, self._eps)


def _seconds(dtype: torch.dtype) -> float:
    """Of one product: many CPUs multiply float32 faster than bfloat16, some of them six times."""
    rows, weight = torch.ones(1024, 1024, dtype=dtype), torch.ones(4096, 1024, dtype=dtype)
    times = []
    for _ in range(3):
        began = time.thread_time()
        functional.linear(rows, weight)
        times.append(time.thread_time() - began)
    return min(times)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(rows.to(weight.dtype), weight, bias).to(rows.dtype)


def _weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            weights |= {name: tensors.get_tensor(name).to(dtype) for name in tensors.keys()}  # noqa: SIM118
    return weights


def _layer(weights: dict[str, Tensor], prefix: str) -> _Layer:
    def of(*names: str) -> Tensor:
        return torch.cat([weights.pop(f"{prefix}{name}") for name in names])

    attention = "self_attn.{}_proj.{}".format
    has_bias = f"{prefix}{attention('q', 'bias')}" in weights
    return _Layer(
        of("input_layernorm.weight"),
        of(*(attention(name, "weight") for name in "qkv")),
        of(*(attention(name, "bias") for name in "qkv")) if has_bias else None,
        of(attention("o", "weight")),
        of("post_attention_layernorm.weight"),
        of("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        of("mlp.down_proj.weight"),
    )
