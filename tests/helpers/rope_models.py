"""Stand-ins for SGLang's attention layers, rotary embeddings and KV pools.

The runtime knows SGLang's objects by class name and attribute only, so a class of the same name with the same
attributes is one of them. `tests/adapter` runs the same code on the real ones.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import torch
from pic_kernels import RopeParams, splice_rows
from pic_kernels.index_pages import PAGE_BYTES, hadamard, place, quantise, split_pages
from pic_kernels.numerics import relative_l2
from torch import Tensor, nn

LINE = re.compile(r"--radix-cache-backend pic does not work with [^:]+: [^;\n]+; [^;\n]+\.")
"""What every refusal looks like: what, why, and what to change."""


def named(name: str, base: type = object) -> type:
    """A class of SGLang's that is another one in all but its name."""
    return type(name, (base,), {})


class RotaryEmbedding(nn.Module):
    """Plain RoPE with a float32 table; `forward_native` rotates through complex numbers."""

    def __init__(self, head_size=16, rotary_dim=16, *, base=1e4, is_neox_style=True, num_positions=2_048, dtype=None):
        super().__init__()
        self.head_size, self.rotary_dim, self.base, self.is_neox_style = head_size, rotary_dim, base, is_neox_style
        angles = torch.arange(num_positions).float()[:, None] * self._table_frequencies()
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("cos_sin_cache", table.to(dtype or torch.float32), persistent=False)

    def _compute_inv_freq(self, base: float) -> Tensor:
        return 1.0 / base ** (torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim)

    def _table_frequencies(self) -> Tensor:
        return self._compute_inv_freq(self.base)

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
        turn = torch.complex(cos, sin)
        return self._rotate(query, turn), self._rotate(key, turn)

    def _rotate(self, rows: Tensor, turn: Tensor) -> Tensor:
        out, half = rows.clone(), self.rotary_dim // 2
        first = slice(0, half) if self.is_neox_style else slice(0, self.rotary_dim, 2)
        second = slice(half, self.rotary_dim) if self.is_neox_style else slice(1, self.rotary_dim, 2)
        turned = torch.complex(rows[..., first].contiguous(), rows[..., second].contiguous()) * turn
        out[..., first], out[..., second] = turned.real, turned.imag
        return out


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    def __init__(self, *, scaling_factors: list[float]) -> None:
        self.scaling_factors = scaling_factors
        super().__init__()

    def _table_frequencies(self) -> Tensor:
        return super()._table_frequencies() / self.scaling_factors[0]


class RadixAttention(nn.Module):
    def __init__(self, layer_id: int, **flags: int) -> None:
        super().__init__()
        self.layer_id, self.sliding_window_size = layer_id, -1
        self.is_cross_attention = self.use_irope = False
        for flag, value in flags.items():
            setattr(self, flag, value)


class Attention(nn.Module):
    """An attention layer; `cores` as in DeepSeek, which has two with one layer id."""

    def __init__(self, rotary: nn.Module | None, *cores: RadixAttention, **flags: bool) -> None:
        super().__init__()
        self.rotary_emb = rotary
        for index, core in enumerate(cores):
            self.add_module(f"attn_{index}", core)
        for flag, value in flags.items():
            setattr(self, flag, value)


class Gemma3RotaryEmbedding(nn.Module):
    """What the model computes for its layers; `angle_factor` is a fault."""

    def __init__(self, *, base: float, factor: float = 1.0, rotary_dim: int = 16) -> None:
        super().__init__()
        self.rope_type = "default" if factor == 1.0 else "linear"
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim) / factor)
        self.angle_factor = 1.0

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq * self.angle_factor
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def make_model(*layers: nn.Module) -> nn.Module:
    """A model whose attention layers are `layers`."""
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    return model


def make_llama(num_layers: int = 3, rotary: nn.Module | None = None) -> nn.Module:
    """A model whose layers share one rotary embedding, as SGLang's do."""
    rotary = rotary or RotaryEmbedding()
    return make_model(*(Attention(rotary, RadixAttention(layer_id)) for layer_id in range(num_layers)))


class MHATokenToKVPool:
    def __init__(self, *, size=64, page_size=1, head_dim=16, v_head_dim=None, layer_num=3, dtype=torch.float32) -> None:
        self.size, self.page_size, self.dtype, self.start_layer = size, page_size, dtype, 0
        self.head_num, self.head_dim, self.v_head_dim = 2, head_dim, v_head_dim or head_dim
        self.kv_cache_layout, self.use_hnd = "nhd", False
        self.is_quantized_kv_cache = self.post_capture_active = False
        store_dtype = torch.uint8 if dtype.itemsize == 1 else dtype
        self.k_buffer, self.v_buffer = (
            [torch.randn(size + page_size, self.head_num, dim).to(dtype).view(store_dtype) for _ in range(layer_num)]
            for dim in (self.head_dim, self.v_head_dim)
        )


class SWAKVPool:
    """Layers 0 and 2 have windows, in 16 slots."""

    def __init__(self, window: MHATokenToKVPool | None = None, **others: object) -> None:
        self.full_kv_pool, self.layer_num = MHATokenToKVPool(layer_num=1), 3
        self.swa_kv_pool = window or MHATokenToKVPool(size=16, head_dim=24, v_head_dim=12, layer_num=2)
        self.layers_mapping = {0: (0, True), 1: (0, False), 2: (1, True)}
        self.full_to_swa_index_mapping = torch.zeros(66, dtype=torch.int64)
        self.swa_req_ring_size = self.request_window = self.swa_uses_full_indices = None
        vars(self).update(others)


class MHATokenToKOnlyPool(MHATokenToKVPool):
    """Index keys of one head."""

    def __init__(self, *, size: int, layer_num: int, dtype: torch.dtype) -> None:
        super().__init__(size=size, head_dim=24, layer_num=layer_num, dtype=dtype)
        self.k_buffer = [buffer[:, :1].contiguous() for buffer in self.k_buffer]


class MiniMaxSparseKVPool:
    """Layers 1 and 2 have an indexer."""

    def __init__(self, dtype: torch.dtype = torch.float32, **others: object) -> None:
        self.main_pool = MHATokenToKVPool(dtype=dtype)
        self.index_k_pool = MHATokenToKOnlyPool(size=64, layer_num=2, dtype=torch.bfloat16)
        self.index_k_layer_id_mapping = {1: 0, 2: 1}
        self.dense_pool = self.index_kv_pool = None
        vars(self).update(others)


class MLATokenToKVPool:
    def __init__(self, *, size=64, page_size=1, qk_rope_head_dim=16, layer_num=3, dtype=torch.float32) -> None:
        self.size, self.page_size, self.dtype, self.start_layer = size, page_size, dtype, 0
        self.kv_lora_rank, self.qk_rope_head_dim = 24, qk_rope_head_dim
        self.use_dsa, self.kv_scale_buffer = False, None
        dim = self.kv_lora_rank + qk_rope_head_dim
        store_dtype = torch.uint8 if dtype.itemsize == 1 else dtype
        self.kv_buffer = [torch.randn(size + page_size, 1, dim).to(dtype).view(store_dtype) for _ in range(layer_num)]


class Indexer(nn.Module):
    """Computes index keys as SGLang does without its fused writers: rotated, mixed, in FP8."""

    use_dsa_indexer_fusion = use_aiter_fused_fp8_writer = False

    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = RotaryEmbedding(64, 64, num_positions=4_096)

    def write(self, pages: Tensor, slots: Tensor, raw: Tensor, first: int) -> None:
        """Write the keys `[n, 128]` of positions from `first` on."""
        rotary = raw[:, None, :64]
        turned = self.rotary_emb.forward_native(first + torch.arange(len(raw)), rotary, rotary)[1][:, 0]
        numbers, scales = quantise(hadamard(torch.cat((turned, raw[:, 64:]), dim=1)))
        split_pages(pages)[0][place(slots)], split_pages(pages)[1][place(slots)] = numbers.view(torch.uint8), scales


def make_dsa(num_layers: int = 3, *, shared: tuple[int, ...] = (), rotary: nn.Module | None = None) -> nn.Module:
    """`make_llama` with an indexer in every layer but those that use another one's index."""
    model = make_llama(num_layers, rotary)
    for layer_id, layer in enumerate(model.layers):
        layer.indexer = None if layer_id in shared else Indexer()
    return model


class DSATokenToKVPool(MLATokenToKVPool):
    """Latent rows, and the keys of indexers in pages of 64 tokens."""

    def __init__(self, *, size=128, layer_num=3, dtype=torch.float32, shared: tuple[int, ...] = ()) -> None:
        super().__init__(size=size, page_size=64, layer_num=layer_num, dtype=dtype)
        self.use_dsa, self.index_kpool, self.index_page_size, self.dsa_kv_cache_store_fp8 = True, 1, 64, False
        num_pages = size // 64 + 1
        pages = [0 if layer in shared else num_pages for layer in range(layer_num)]
        buffer = [torch.zeros(each, PAGE_BYTES, dtype=torch.uint8) for each in pages]
        self.index_key_cache = SimpleNamespace(buffer=buffer)


def rotation_error(rotary: nn.Module, params: RopeParams) -> float:
    """Keys that `params` move against keys that the module itself rotates at the new position: the largest over shifts.

    Relative L2; near and far, forward and back.
    """
    keys = torch.randn((4, 2, int(rotary.head_size)), generator=torch.Generator().manual_seed(0))

    def rotated(position: int) -> Tensor:
        with torch.no_grad():
            if hasattr(rotary, "forward_native"):
                turned = rotary.forward_native(torch.full((4,), position), keys.clone(), keys.clone())[1]
            else:
                turned = rotary(torch.full((4,), position), keys.flatten(1), keys.flatten(1))[1]
        return turned.reshape(keys.shape).contiguous()

    errors = []
    for shift in (1, 17, 1_000, -5):
        here, there = rotated(11), rotated(11 + shift)
        rows = torch.cat((here, torch.full_like(here, torch.nan)))
        splice_rows([rows], None, torch.arange(4), torch.arange(4, 8), torch.full((4,), shift), params)
        errors.append(relative_l2(rows[4:], there))
    return max(errors)
