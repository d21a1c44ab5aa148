"""Small models with seeded random weights and SmolLM2's tokenizer: `tiny-mla` and `tiny-gqa`.

The same recipe gives the same bytes on every machine: the numbers are scaled uniform draws of PCG64, which have no
rounding of their own. Queries and keys are drawn wide, so that attention is sharp and the next token depends on where
things stand. The output layer is not tied to the embedding, so that a greedy text does not repeat its last token.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sglang_pic.models import checkpoint, smollm2
from sglang_pic.models.checkpoint import Config, Progress

if TYPE_CHECKING:
    import torch

_VOCAB_SIZE = 49_152
HIDDEN, _NUM_LAYERS, _NUM_HEADS, _MLP_SIZE = 256, 4, 8, 512
_NUM_KV_HEADS, _HEAD_DIM = 4, 32
"""Of GQA."""
_LATENT_RANK, _NOPE_DIM, _ROPE_DIM, _VALUE_DIM, _NUM_EXPERTS, _EXPERT_SIZE = 512, 32, 64, 32, 8, 128
"""Of MLA; its first layer has no experts."""

_SHARPNESS = 2.0
"""Factor of the weights that make queries and keys; 1 keeps their variance."""

_CONFIDENCE = 3.0
"""Standard deviation of the logits; 1 would leave no token with a probability worth comparing."""

_DRAW_VERSION = 1
"""Raise when the same recipe draws other weights."""

_COMMON: Config = {
    "bos_token_id": smollm2.BOS_ID,
    "dtype": "bfloat16",
    "eos_token_id": smollm2.EOS_ID,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": _MLP_SIZE,
    "max_position_embeddings": smollm2.CONTEXT_LEN,
    "num_attention_heads": _NUM_HEADS,
    "num_hidden_layers": _NUM_LAYERS,
    "pad_token_id": smollm2.EOS_ID,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": _VOCAB_SIZE,
}

_GQA: Config = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": _HEAD_DIM,
    "mlp_bias": False,
    "num_key_value_heads": _NUM_KV_HEADS,
}

_MLA: Config = (
    checkpoint.DEEPSEEK_V2
    | _COMMON
    | {
        "first_k_dense_replace": 1,
        "kv_lora_rank": _LATENT_RANK,
        "moe_intermediate_size": _EXPERT_SIZE,
        "n_routed_experts": _NUM_EXPERTS,
        "num_key_value_heads": _NUM_HEADS,
        "qk_nope_head_dim": _NOPE_DIM,
        "qk_rope_head_dim": _ROPE_DIM,
        "rope_scaling": checkpoint.yarn(factor=4.0, original_len=2048, mscale=0.707),
        "v_head_dim": _VALUE_DIM,
    }
)


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a random-weight model is made from."""

    seed: int
    config: Config
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


def write(recipe: Recipe, target: Path, progress: Progress) -> None:
    """Write configuration, weights and tokenizer into the empty folder `target`."""
    progress("drawing the weights")
    write_folder(target, recipe.config, draw_weights(recipe), progress)


def draw_weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Every tensor of a recipe by its name, float32."""
    import torch

    draw = np.random.Generator(np.random.PCG64(recipe.seed))
    return {name: torch.from_numpy(_draw(draw, shape, _scale(name, shape))) for name, shape in _shapes(recipe).items()}


def write_folder(target: Path, config: Config, weights: dict[str, torch.Tensor], progress: Progress) -> None:
    """Write a checkpoint with SmolLM2's tokenizer into the empty folder `target`."""
    generation = {"bos_token_id": smollm2.BOS_ID, "eos_token_id": smollm2.EOS_ID, "pad_token_id": smollm2.EOS_ID}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    checkpoint.write(target, config, weights)
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


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor, in the order they are drawn."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCAB_SIZE, HIDDEN)}
    for index in range(_NUM_LAYERS):
        if recipe.config["model_type"] == "llama":
            layer = _layer(_gqa_attention()) | _mlp("mlp", _MLP_SIZE)
        else:
            is_dense = index < int(str(recipe.config["first_k_dense_replace"]))
            layer = _layer(_mla_attention()) | (_mlp("mlp", _MLP_SIZE) if is_dense else _experts())
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (_VOCAB_SIZE, HIDDEN)}


def _layer(attention: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    parts = {f"self_attn.{name}": shape for name, shape in attention.items()}
    return {"input_layernorm": (HIDDEN,), **parts, "post_attention_layernorm": (HIDDEN,)}


def _gqa_attention() -> dict[str, tuple[int, ...]]:
    query, key = _NUM_HEADS * _HEAD_DIM, _NUM_KV_HEADS * _HEAD_DIM
    return {
        "q_proj": (query, HIDDEN),
        "k_proj": (key, HIDDEN),
        "v_proj": (key, HIDDEN),
        "o_proj": (HIDDEN, query),
    }


def _mla_attention() -> dict[str, tuple[int, ...]]:
    return {
        "q_proj": (_NUM_HEADS * (_NOPE_DIM + _ROPE_DIM), HIDDEN),
        "kv_a_proj_with_mqa": (_LATENT_RANK + _ROPE_DIM, HIDDEN),
        "kv_a_layernorm": (_LATENT_RANK,),
        "kv_b_proj": (_NUM_HEADS * (_NOPE_DIM + _VALUE_DIM), _LATENT_RANK),
        "o_proj": (HIDDEN, _NUM_HEADS * _VALUE_DIM),
    }


def _experts() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (_NUM_EXPERTS, HIDDEN)}
    for expert in range(_NUM_EXPERTS):
        shapes |= _mlp(f"mlp.experts.{expert}", _EXPERT_SIZE)
    return shapes | _mlp("mlp.shared_experts", _EXPERT_SIZE)


def _mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj": (width, HIDDEN),
        f"{prefix}.up_proj": (width, HIDDEN),
        f"{prefix}.down_proj": (HIDDEN, width),
    }
