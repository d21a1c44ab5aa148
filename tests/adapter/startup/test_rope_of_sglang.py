"""Geometry, pools and splices on SGLang's own rotary embeddings and KV pools."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pic_kernels import splice_rows
from pic_kernels.numerics import relative_l2
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.mem_cache import memory_pool
from torch import nn

from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime import PoolKind, Splicer, read_geometry, rope, view_pool, views
from tests.helpers import rope_models as models
from tests.helpers.builders import make_pool

TRAINED = {"original_max_position_embeddings": 1_024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}
YARN = {"rope_type": "yarn", "factor": 4.0, **TRAINED}
DEEPSEEK_YARN = {"rope_type": "deepseek_yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.9, **TRAINED}
SHORT_FACTORS = [1.0 + index / 10 for index in range(32)]
LONG = {"rope_type": "longrope", "short_factor": SHORT_FACTORS, "long_factor": [7.0] * 32, **TRAINED}
M_ROPE = {"rope_type": "default", "mrope_section": [8, 12, 12]}

SCALINGS = {
    "none": (None, "RotaryEmbedding"),
    "partial": (None, "RotaryEmbedding"),
    "default": ({"rope_type": "default"}, "RotaryEmbedding"),
    "llama3": (LLAMA3, "Llama3RotaryEmbedding"),
    "linear": ({"rope_type": "linear", "factor": 2.5}, "LinearScalingRotaryEmbedding"),
    "yarn": (YARN, "YaRNScalingRotaryEmbedding"),
    "yarn with mscale": ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, "YaRNScalingRotaryEmbedding"),
    "mrope": (M_ROPE, "MRotaryEmbedding"),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, "DynamicNTKScalingRotaryEmbedding"),
    "dynamic alpha": ({"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}, "DynamicNTKAlphaRotaryEmbedding"),
    "longrope": (LONG, "Phi3LongRoPEScaledRotaryEmbedding"),
    "proportional": ({"rope_type": "proportional"}, "Gemma4RotaryEmbedding"),
}


def _model(rotary: nn.Module) -> nn.Module:
    model = nn.Module()
    model.rotary_emb, model.attn = rotary, models.RadixAttention(0)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_are_read_and_verified(name: str, is_neox: bool, dtype: torch.dtype) -> None:
    """The frequencies read, without any magnitude, turn keys as the live module does; its table is in `dtype`."""
    scaling, class_name = SCALINGS[name]
    if name == "longrope" and not is_neox:
        pytest.skip("SGLang has none")
    width, share = (128, 0.25) if name in ("partial", "proportional") else (64, 1.0)
    rotary = factory.get_rope(width, width, 2_048, 10_000, is_neox, scaling, dtype=dtype, partial_rotary_factor=share)
    max_shift = int(rope._FIXED_LENGTHS.get(class_name, lambda _: 131_072)(rotary))
    geometry = read_geometry(_model(rotary), max_shift=max_shift)
    assert type(rotary).__name__ == class_name
    turning = width if name == "proportional" else width * share
    assert (geometry.params[0].rotary_dim, geometry.params[0].is_neox_style) == (turning, is_neox)
    limit = 1e-3 if dtype == torch.float32 else 2e-2
    assert models.rotation_error(rotary, geometry.params[0]) <= limit


@pytest.mark.parametrize("make", [factory.get_rope, factory.get_rope_cpu])
@pytest.mark.parametrize("is_neox", [True, False])
def test_deepseek_yarn_is_read_and_verified(make: Callable[..., Any], is_neox: bool) -> None:
    device = {"device": "cpu"} if make is factory.get_rope_cpu else {}
    rotary = make(64, 64, 40_960, 10_000, is_neox, DEEPSEEK_YARN, dtype=torch.float32, **device)
    assert rotary.mscale != 1.0
    geometry = read_geometry(_model(rotary), max_shift=131_072)
    assert type(rotary).__name__ == "DeepseekScalingRotaryEmbedding"
    assert models.rotation_error(rotary, geometry.params[0]) <= 1e-3


@pytest.mark.parametrize(("name", "fixed_len"), [("dynamic", 4_096), ("dynamic alpha", 2_048), ("longrope", 1_024)])
def test_frequencies_that_change_behind_some_position_are_refused_there(name: str, fixed_len: int) -> None:
    """SGLang's own modules: a table that grows has other frequencies there, or the whole batch turns by other ones."""
    rotary = factory.get_rope(64, 64, 2_048, 10_000, True, SCALINGS[name][0], dtype=torch.float32)
    start_with = f"{type(rotary).__name__} in a context of .*; start with --context-length {fixed_len}"
    with pytest.raises(UnsupportedError, match=start_with):
        read_geometry(_model(rotary), max_shift=fixed_len + 1)
    (params,) = read_geometry(_model(rotary), max_shift=fixed_len).params
    row, last = torch.randn(1, 64), fixed_len - 1

    def turned(*positions: int) -> torch.Tensor:
        rows = row.repeat(len(positions), 1)
        return getattr(rotary, "forward_native", rotary)(torch.tensor(positions), rows.clone(), rows)[1][0]

    def error(position: int, expected: torch.Tensor) -> float:
        rows = torch.stack((turned(5), row[0]))[:, None]
        splice_rows([rows], None, *(torch.tensor([at]) for at in (0, 1, position - 5)), params)
        return relative_l2(rows[1, 0], expected)

    assert error(last, turned(last)) <= 5e-3
    if name == "longrope":
        assert error(last, turned(last, fixed_len + 1)) > 0.1
    else:
        rotary._ensure_cos_sin_cache_length(fixed_len + 100)
        assert error(fixed_len + 50, turned(fixed_len + 50)) > 0.1


def test_every_known_class_name_is_sglangs() -> None:
    """A class renamed by SGLang must not turn a reasoned refusal, or support, into "unknown"."""
    assert set(rope.KNOWN_EMBEDDINGS) | set(rope.REFUSED_EMBEDDINGS) <= set(vars(factory))
    assert set(views.KNOWN_POOLS) <= set(vars(memory_pool))
    gemma3 = importlib.import_module("sglang.srt.models.gemma3_causal")
    assert set(rope.MODEL_EMBEDDINGS) | rope._TURNED_BY_MODEL <= set(vars(gemma3))


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}])
def test_what_gemma3_hands_to_its_layers_is_read(scaling: dict[str, Any]) -> None:
    """By SGLang's own module, and keys turned by Hugging Face's function as its layers turn them."""
    gemma3 = importlib.import_module("sglang.srt.models.gemma3_causal")
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e6, **scaling}, max_position_embeddings=8_192, head_dim=64)
    config.standardize_rope_params = lambda: None
    rotary = gemma3.Gemma3RotaryEmbedding(config)
    params = rope._read_params(rotary, 8_192)
    assert (params.rotary_dim, params.is_neox_style) == (64, True)

    class Turns(nn.Module):
        head_size = 64

        def forward_native(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
            cos, sin = (part.reshape(-1, 64) for part in rotary(key, positions[None]))
            return gemma3.apply_rotary_pos_emb(query, key, cos, sin)

    assert models.rotation_error(Turns(), params) <= 1e-3


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("memory_pool", "MHATokenToKVPoolFP4"),
        ("memory_pool", "NoOpMHATokenToKVPool"),
        ("memory_pool", "PageMajorMHATokenToKVPool"),
        ("page_interleave_pool", "PageInterleaveMHATokenToKVPool"),
        ("page_interleave_pool", "PageInterleaveMLATokenToKVPool"),
    ],
)
def test_pools_with_a_reason_of_their_own_give_it(module: str, name: str) -> None:
    """By SGLang's own class, whose bases decide which reason is found."""
    pool = object.__new__(getattr(importlib.import_module(f"sglang.srt.mem_cache.{module}"), name))
    own = views.REFUSED_POOLS.get(name)
    with pytest.raises(UnsupportedError, match=f"{name}: {own.reason if own else '.*--enable-kv-cache-sharding'}"):
        view_pool(pool)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("mha", torch.bfloat16), ("mha", torch.float8_e4m3fn), ("mla", torch.bfloat16)], ids=str
)
def test_pools_are_spliced(kind: str, dtype: torch.dtype) -> None:
    """An MLA row as DeepSeek's attention stores it: latent, then the key's rotary part, pairs still interleaved."""
    if kind == "mha":
        pool = make_pool(kind, size=64, page_size=16, dtype=dtype)
        form = (PoolKind.MHA, 80, dtype, 0, 64)
        rotary: Any = factory.get_rope(64, 64, 2_048, 10_000, True, LLAMA3, dtype=torch.float32)
        raw, shift = torch.randn(20, 2, 64), 777
    else:
        pool = make_pool(kind, size=64, kv_lora_rank=512)
        form = (PoolKind.MLA, 65, dtype, 512, 64)
        rotary = factory.get_rope_cpu(64, 64, 40_960, 10_000, False, DEEPSEEK_YARN, dtype=torch.float32, device="cpu")
        raw, shift = torch.randn(20, 1, 64), 30_000
    view = view_pool(pool)
    assert (view.kind, view.num_slots, view.dtype, view.rope_offset, view.rope_dim) == form
    at, src, dst = torch.arange(20) + 30, torch.arange(20) + 1, torch.arange(20) + 40
    rows = view.keys[0].view(pool.store_dtype)
    rows[src] = torch.randn(20, *rows.shape[1:]).to(dtype).view(pool.store_dtype)
    rows[src, :, view.rope_offset :] = rotary.forward_native(at, raw, raw)[1].to(dtype).view(pool.store_dtype)
    Splicer(view, read_geometry(_model(rotary), max_shift=40_960)).splice(src, dst, torch.full((20,), shift))
    fresh, moved = rotary.forward_native(at + shift, raw, raw)[1], pool.get_key_buffer(0)[dst]
    assert relative_l2(moved[..., view.rope_offset :], fresh) <= (5e-3 if dtype == torch.bfloat16 else 5e-2)
    assert torch.equal(rows[dst, :, : view.rope_offset], rows[src, :, : view.rope_offset])
