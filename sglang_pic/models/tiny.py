"""Small models with seeded random weights and SmolLM2's tokenizer: `tiny-mla` and `tiny-gqa`.

Owns their shapes and the draw. The same recipe gives the same bytes on every machine: the numbers are scaled uniform
draws of PCG64, which have no rounding of their own. Queries and keys are drawn wide, so that attention is sharp and the
next token depends on where things stand; the output layer is not tied to the embedding, so that a greedy text does not
repeat its last token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from sglang_pic.models import smollm2

__all__ = ["RECIPES", "Recipe", "fingerprint", "write"]

_VOCAB_SIZE = 49_152
_HIDDEN = 256
_NUM_LAYERS = 4
_SHARPNESS = 2.0
"""Factor of the weights that make queries and keys; 1 keeps their variance."""

_CONFIDENCE = 3.0
"""Standard deviation of the logits; 1 would leave no token with a probability worth comparing."""

_DRAW_VERSION = 1
"""Raise when the same recipe draws other weights."""

_Json = str | int | float | bool | None | list[str] | dict[str, str | float | int]

_COMMON: dict[str, _Json] = {
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": smollm2.EOS_ID,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "initializer_range": 0.02,
    "max_position_embeddings": smollm2.CONTEXT_LEN,
    "num_hidden_layers": _NUM_LAYERS,
    "pad_token_id": smollm2.EOS_ID,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": _VOCAB_SIZE,
}

_GQA: dict[str, _Json] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 32,
    "intermediate_size": 512,
    "mlp_bias": False,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_theta": 10_000.0,
}

_MLA: dict[str, _Json] = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": False,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 32,
}


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a random-weight model is made from."""

    seed: int
    config: dict[str, _Json]
    """The Hugging Face `config.json`."""


RECIPES: dict[str, Recipe] = {
    "tiny-gqa": Recipe(seed=20_260, config=_GQA),
    "tiny-mla": Recipe(seed=20_261, config=_MLA),
}


def fingerprint(recipe: Recipe) -> str:
    """Identifies the recipe, the tokenizer's source and the way of drawing."""
    import xxhash

    content = json.dumps(msgspec.to_builtins(recipe), sort_keys=True).encode()
    return f"tiny:{xxhash.xxh3_128_hexdigest(content)}:{smollm2.fingerprint()}:v{_DRAW_VERSION}"


def write(recipe: Recipe, target: Path, progress: Callable[[str], None]) -> None:
    """Write configuration, weights and tokenizer into the empty folder `target`."""
    import torch
    from safetensors.torch import save_file

    progress("drawing the weights")
    (target / "config.json").write_text(json.dumps(recipe.config, indent=2, sort_keys=True) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": smollm2.EOS_ID, "pad_token_id": smollm2.EOS_ID}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    draw = np.random.Generator(np.random.PCG64(recipe.seed))
    weights = {
        name: torch.from_numpy(_draw(draw, shape, _scale(name, shape))).to(torch.bfloat16)
        for name, shape in _shapes(recipe.config).items()
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    smollm2.write_tokenizer(target, progress)


def _draw(draw: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Uniform numbers with standard deviation `scale`; ones for a norm's weight, float32."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    half_width = np.float32(scale * math.sqrt(3.0))
    return (draw.random(shape, dtype=np.float32) * np.float32(2) - np.float32(1)) * half_width


def _scale(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a matrix: it keeps its input's variance, except where attention is to be sharp."""
    if "embed_tokens" in name:
        return 1.0
    if "lm_head" in name:
        return _CONFIDENCE / math.sqrt(shape[-1])
    sharp = any(part in name for part in ("q_proj", "k_proj", "kv_a_proj"))
    return (_SHARPNESS if sharp else 1.0) / math.sqrt(shape[-1])


def _shapes(config: dict[str, _Json]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor, in the order they are drawn."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCAB_SIZE, _HIDDEN)}
    for index in range(_NUM_LAYERS):
        layer = _mla_layer(config, index) if config["model_type"] == "deepseek_v2" else _gqa_layer(config)
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (_HIDDEN,), "lm_head.weight": (_VOCAB_SIZE, _HIDDEN)}


def _gqa_layer(config: dict[str, _Json]) -> dict[str, tuple[int, ...]]:
    query, key = (
        _size(config, name) * _size(config, "head_dim") for name in ("num_attention_heads", "num_key_value_heads")
    )
    return {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (query, _HIDDEN),
        "self_attn.k_proj": (key, _HIDDEN),
        "self_attn.v_proj": (key, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, query),
        "post_attention_layernorm": (_HIDDEN,),
    } | _mlp("mlp", _size(config, "intermediate_size"))


def _mla_layer(config: dict[str, _Json], index: int) -> dict[str, tuple[int, ...]]:
    heads, rank = _size(config, "num_attention_heads"), _size(config, "kv_lora_rank")
    nope, rope, value = (_size(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (heads * (nope + rope), _HIDDEN),
        "self_attn.kv_a_proj_with_mqa": (rank + rope, _HIDDEN),
        "self_attn.kv_a_layernorm": (rank,),
        "self_attn.kv_b_proj": (heads * (nope + value), rank),
        "self_attn.o_proj": (_HIDDEN, heads * value),
        "post_attention_layernorm": (_HIDDEN,),
    }
    if index < _size(config, "first_k_dense_replace"):
        return shapes | _mlp("mlp", _size(config, "intermediate_size"))
    num_experts, width = _size(config, "n_routed_experts"), _size(config, "moe_intermediate_size")
    shapes |= {"mlp.gate": (num_experts, _HIDDEN)}
    for expert in range(num_experts):
        shapes |= _mlp(f"mlp.experts.{expert}", width)
    return shapes | _mlp("mlp.shared_experts", width * _size(config, "n_shared_experts"))


def _mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj": (width, _HIDDEN),
        f"{prefix}.up_proj": (width, _HIDDEN),
        f"{prefix}.down_proj": (_HIDDEN, width),
    }


def _size(config: dict[str, _Json], name: str) -> int:
    value = config[name]
    assert isinstance(value, int)
    return value
