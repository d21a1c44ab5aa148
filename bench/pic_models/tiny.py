"""Small models with seeded random weights and SmolLM2's tokenizer, one of each family that is served.

The same recipe gives the same bytes on every machine: the numbers are scaled uniform draws of PCG64, which have no
rounding of their own. Queries and keys are drawn wide, so that attention is sharp and the next token depends on where
things stand. The output layer is not tied to the embedding, so that a greedy text does not repeat its last token; where
the family ties them, the embedding is small beside the layers' outputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from pic_models import checkpoint, smollm2, vision
from pic_models.checkpoint import Config, Progress

if TYPE_CHECKING:
    import torch

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""By a tensor's name."""

_VOCAB_SIZE = 49_152
HIDDEN, _NUM_LAYERS, _NUM_HEADS, _MLP_SIZE = 256, 4, 8, 512
_NUM_KV_HEADS, _HEAD_DIM = 4, 32
"""Of GQA."""
_LATENT_RANK, _NOPE_DIM, _ROPE_DIM, _VALUE_DIM, _NUM_EXPERTS, _EXPERT_SIZE = 512, 32, 64, 32, 8, 128
"""Of MLA; its first layer has no experts."""

_QUERY_RANK, _INDEX_HEADS, _INDEX_DIM = 128, 4, 128
"""Of MLA with an indexer: queries are made of a latent of their own."""

_WINDOW, _GPT_OSS_HEAD_DIM = 48, 64
"""Of the families with sliding windows: tokens that a query sees in a windowed layer, its own with them."""

_CHUNK = 64
"""Of the family whose attention is cut in chunks."""

_MIMO_HEAD_DIM = 48
"""Of queries and keys; values are as wide as in GQA."""

_STATE_HEADS, _CONV_WIDTH = 4, 4
"""Of the family with recurrent state: heads of its values, and inputs of its convolution."""

_SHARPNESS = 2.0
"""Factor of the weights that make queries and keys; 1 keeps their variance."""

_CONFIDENCE = 3.0
"""Standard deviation of the logits; 1 would leave no token with a probability worth comparing."""

_BIAS = 0.1
"""Standard deviation of biases."""

_FORGETTING = 4.0
"""Standard deviation of the parameter by which a head's state decays: some heads forget at once, some never."""

_TIED = ("gemma3_text", "cohere2")
_TIED_EMBEDDING = 1 / 64
"""Standard deviation of an embedding that is the output layer too."""

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


_DSA: Config = _MLA | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": _INDEX_DIM,
    "index_n_heads": _INDEX_HEADS,
    "index_topk": 64,
    # A layer marked S attends to the tokens that the layer before it chose.
    "index_topk_pattern": "FFSF",
    "q_lora_rank": _QUERY_RANK,
}

_GEMMA3: Config = _COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": _HEAD_DIM,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "num_key_value_heads": _NUM_KV_HEADS,
    "query_pre_attn_scalar": _HEAD_DIM,
    # The models from 4B on scale the rotation of their global layers so.
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "sliding_window": _WINDOW,
    "tie_word_embeddings": True,
}

_GPT_OSS: Config = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    # SGLang makes its layers in this dtype and ignores `--dtype`; tests need float32.
    "dtype": "float32",
    "head_dim": _GPT_OSS_HEAD_DIM,
    "intermediate_size": _EXPERT_SIZE,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_experts_per_tok": 2,
    "num_key_value_heads": _NUM_KV_HEADS,
    "num_local_experts": _NUM_EXPERTS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "rope_theta": 150_000.0,
        "truncate": False,
    },
    "sliding_window": _WINDOW,
    "swiglu_limit": 7.0,
}


_COHERE2: Config = _COMMON | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "head_dim": _HEAD_DIM,
    "layer_norm_eps": 1e-5,
    # Its layers without windows have no positions.
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "logit_scale": 1.0,
    "num_key_value_heads": _NUM_KV_HEADS,
    # SGLang does not count a query's own token here.
    "sliding_window": _WINDOW - 1,
    "tie_word_embeddings": True,
}


_QWEN2_5_VL: Config = (
    _COMMON
    | vision.TOKEN_IDS
    | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "num_key_value_heads": _NUM_KV_HEADS,
        # Of a head's 16 frequencies so many turn by time, by height and by width.
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vision_config": vision.VISION_CONFIG | {"out_hidden_size": HIDDEN},
    }
)


_MIMO: Config = _COMMON | {
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2_flash",
    "add_swa_attention_sink_bias": True,
    "attention_value_scale": 0.707,
    "head_dim": _MIMO_HEAD_DIM,
    # 1 is a layer with a window.
    "hybrid_layer_pattern": [1, 0, 1, 0],
    "layernorm_epsilon": 1e-5,
    "moe_layer_freq": [0] * _NUM_LAYERS,
    "n_routed_experts": _NUM_EXPERTS,
    "num_key_value_heads": _NUM_KV_HEADS // 2,
    # A third of a key turns.
    "partial_rotary_factor": 0.334,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
    "rope_theta": 5_000_000.0,
    "sliding_window_size": _WINDOW - 1,
    "swa_head_dim": _MIMO_HEAD_DIM,
    "swa_num_attention_heads": _NUM_HEADS,
    "swa_num_key_value_heads": _NUM_KV_HEADS,
    "swa_rope_theta": 10_000.0,
    "swa_v_head_dim": _HEAD_DIM,
    "v_head_dim": _HEAD_DIM,
}


_LLAMA4: Config = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "bos_token_id": smollm2.BOS_ID,
    "dtype": "bfloat16",
    "eos_token_id": smollm2.EOS_ID,
    "pad_token_id": smollm2.EOS_ID,
    "tie_word_embeddings": False,
    "text_config": _COMMON
    | {
        "model_type": "llama4_text",
        "attention_chunk_size": _CHUNK,
        "head_dim": _HEAD_DIM,
        "intermediate_size_mlp": _MLP_SIZE,
        # No layer has experts.
        "interleave_moe_layer_step": _NUM_LAYERS + 1,
        "num_key_value_heads": _NUM_KV_HEADS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        # On a CPU SGLang norms keys in bfloat16.
        "use_qk_norm": False,
    },
}


_MINIMAX: Config = _COMMON | {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m2",
    "dense_intermediate_size": _MLP_SIZE,
    "head_dim": _HEAD_DIM,
    "moe_layer_freq": [0] * _NUM_LAYERS,
    "num_key_value_heads": _NUM_KV_HEADS,
    "num_local_experts": _NUM_EXPERTS,
    "qk_norm_type": "per_head",
    "rotary_dim": _HEAD_DIM // 2,
    "sparse_attention_config": {
        # The first layer has no indexer.
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_block_size": 16,
        "sparse_disable_index_value": [0, 1, 1, 1],
        "sparse_index_dim": _HEAD_DIM,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_num_index_heads": _NUM_KV_HEADS,
        "sparse_topk_blocks": 4,
    },
    "use_gemma_norm": False,
    "use_qk_norm": True,
}


_QWEN3_NEXT: Config = _COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    # The last layer has full attention, the others the gated delta rule.
    "full_attention_interval": _NUM_LAYERS,
    "head_dim": _HEAD_DIM,
    "linear_conv_kernel_dim": _CONV_WIDTH,
    "linear_key_head_dim": _HEAD_DIM,
    "linear_num_key_heads": _STATE_HEADS // 2,
    "linear_num_value_heads": _STATE_HEADS,
    "linear_value_head_dim": _HEAD_DIM,
    "mlp_only_layers": [],
    "moe_intermediate_size": _EXPERT_SIZE,
    "norm_topk_prob": True,
    "num_experts": _NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_key_value_heads": _NUM_KV_HEADS,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": _EXPERT_SIZE,
}


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes and options of a model with random weights."""

    seed: int
    config: Config
    """The Hugging Face `config.json`."""


RECIPES: dict[str, Recipe] = {
    "tiny-gqa": Recipe(seed=20_260, config=_GQA),
    "tiny-mla": Recipe(seed=20_261, config=_MLA),
    "tiny-gemma3": Recipe(seed=20_262, config=_GEMMA3),
    "tiny-gpt-oss": Recipe(seed=20_263, config=_GPT_OSS),
    "tiny-cohere2": Recipe(seed=20_264, config=_COHERE2),
    "tiny-dsa": Recipe(seed=20_265, config=_DSA),
    "tiny-qwen2.5-vl": Recipe(seed=20_266, config=_QWEN2_5_VL),
    "tiny-llama4": Recipe(seed=20_267, config=_LLAMA4),
    "tiny-minimax": Recipe(seed=20_268, config=_MINIMAX),
    "tiny-qwen3-next": Recipe(seed=20_269, config=_QWEN3_NEXT),
}

MIMO: Final = Recipe(seed=20_266, config=_MIMO)
"""Of a model that has heads beside its layers; `drafts` makes them."""


def fingerprint(recipe: Recipe) -> str:
    """Identifies the recipe, the tokenizer's source and the way of drawing."""
    import xxhash

    content = json.dumps(msgspec.to_builtins(recipe), sort_keys=True).encode()
    return f"tiny:{xxhash.xxh3_128_hexdigest(content)}:{smollm2.fingerprint()}:v{_DRAW_VERSION}"


def write(recipe: Recipe, target: Path, progress: Progress) -> None:
    """Write configuration, weights and tokenizer into the empty folder `target`."""
    progress("drawing the weights")
    write_folder(target, recipe.config, draw_weights(recipe), progress)
    if "vision_config" in recipe.config:
        vision.write_processor(target)


def draw_weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Every tensor of a recipe by its name, float32."""
    import torch

    draw = np.random.Generator(np.random.PCG64(recipe.seed))
    family, shapes = _family(recipe), _shapes(recipe)
    return {name: torch.from_numpy(_weight(draw, name, shape, family)) for name, shape in shapes.items()}


def write_folder(target: Path, config: Config, weights: dict[str, torch.Tensor], progress: Progress) -> None:
    """Write a checkpoint with SmolLM2's tokenizer into the empty folder `target`."""
    generation = {"bos_token_id": smollm2.BOS_ID, "eos_token_id": smollm2.EOS_ID, "pad_token_id": smollm2.EOS_ID}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    checkpoint.write(target, config, weights)
    smollm2.write_tokenizer(target, progress)


def _weight(draw: np.random.Generator, name: str, shape: tuple[int, ...], family: str) -> np.ndarray:
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")):
        return np.full(shape, _norm(name, family), dtype=np.float32)
    return _draw(draw, shape, _scale(name, shape, family))


def _norm(name: str, family: str) -> float:
    """A norm's weight: Gemma and Qwen3-Next multiply by one more, and a tied embedding cannot sharpen logits."""
    added = 1.0 if family == "gemma3_text" or (family == "qwen3_next" and "linear_attn" not in name) else 0.0
    if family in _TIED and name == "model.norm.weight":
        return _CONFIDENCE / _TIED_EMBEDDING / math.sqrt(HIDDEN) - added
    return (_SHARPNESS if "q_norm" in name or "k_norm" in name else 1.0) - added


def _draw(draw: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Uniform numbers with standard deviation `scale`, float32."""
    half_width = np.float32(scale * math.sqrt(3.0))
    return (draw.random(shape, dtype=np.float32) * np.float32(2) - np.float32(1)) * half_width


def _scale(name: str, shape: tuple[int, ...], family: str) -> float:
    """Standard deviation of a matrix: it keeps its input's variance, except where attention is to be sharp."""
    if "embed_tokens" in name:
        return _TIED_EMBEDDING if family in _TIED else 1.0
    if "lm_head" in name:
        return _CONFIDENCE / math.sqrt(shape[-1])
    if "dt_bias" in name:
        return _FORGETTING
    if "sinks" in name or "A_log" in name or "bias" in name:
        return _BIAS if "bias" in name else 1.0
    if len(shape) == 5:
        return 1.0 / math.sqrt(math.prod(shape[1:]))
    # Experts of gpt-oss lie in one tensor, inputs before outputs.
    inputs = shape[-2] if "experts" in name and len(shape) == 3 else shape[-1]
    sharp = any(part in name for part in ("q_proj", "k_proj", "kv_a_proj"))
    return (_SHARPNESS if sharp else 1.0) / math.sqrt(inputs)


def _shapes(recipe: Recipe) -> Shapes:
    """Names and shapes of every tensor, in the order they are drawn."""
    shapes: Shapes = {"model.embed_tokens.weight": (_VOCAB_SIZE, HIDDEN)}
    for index in range(_NUM_LAYERS):
        layer = _LAYERS[_family(recipe)](recipe.config, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    if "vision_config" in recipe.config:
        shapes |= vision.tower(HIDDEN)
    return shapes if recipe.config["tie_word_embeddings"] else shapes | {"lm_head.weight": (_VOCAB_SIZE, HIDDEN)}


def _family(recipe: Recipe) -> str:
    return str(recipe.config["model_type"])


def _llama(_config: Config, _index: int) -> Shapes:
    return _weights(_layer(_gqa_attention()) | _mlp("mlp", _MLP_SIZE))


def _deepseek(config: Config, index: int) -> Shapes:
    is_dense = index < int(str(config["first_k_dense_replace"]))
    return _weights(_layer(_mla_attention()) | (_mlp("mlp", _MLP_SIZE) if is_dense else _experts()))


def _dsa(config: Config, index: int) -> Shapes:
    shapes = {
        "self_attn.q_a_proj.weight": (_QUERY_RANK, HIDDEN),
        "self_attn.q_a_layernorm.weight": (_QUERY_RANK,),
        "self_attn.q_b_proj.weight": (_NUM_HEADS * (_NOPE_DIM + _ROPE_DIM), _QUERY_RANK),
    }
    if str(config["index_topk_pattern"])[index] == "F":
        shapes |= {
            "self_attn.indexer.wq_b.weight": (_INDEX_HEADS * _INDEX_DIM, _QUERY_RANK),
            "self_attn.indexer.wk.weight": (_INDEX_DIM, HIDDEN),
            "self_attn.indexer.k_norm.weight": (_INDEX_DIM,),
            "self_attn.indexer.k_norm.bias": (_INDEX_DIM,),
            "self_attn.indexer.weights_proj.weight": (_INDEX_HEADS, HIDDEN),
        }
    rest = _deepseek(config, index)
    del rest["self_attn.q_proj.weight"]
    return shapes | rest


def _gemma3(_config: Config, _index: int) -> Shapes:
    norms = {f"{place}_feedforward_layernorm": (HIDDEN,) for place in ("pre", "post")}
    of_heads = {f"{part}_norm": (_HEAD_DIM,) for part in "qk"}
    return _weights(_layer(_gqa_attention() | of_heads) | _mlp("mlp", _MLP_SIZE) | norms)


def _llama4(_config: Config, _index: int) -> Shapes:
    return _weights(_layer(_gqa_attention()) | _mlp("feed_forward", _MLP_SIZE))


def _minimax(_config: Config, index: int) -> Shapes:
    attention = _gqa_attention() | {f"{part}_norm": (_HEAD_DIM,) for part in "qk"}
    if index:
        attention |= {"index_q_proj": (_NUM_KV_HEADS * _HEAD_DIM, HIDDEN), "index_k_proj": (_HEAD_DIM, HIDDEN)}
        attention |= {f"index_{part}_norm": (_HEAD_DIM,) for part in "qk"}
    return _weights(_layer(attention) | _mlp("mlp", _MLP_SIZE))


def _mimo(config: Config, index: int) -> Shapes:
    has_window = list(config["hybrid_layer_pattern"])[index] == 1  # type: ignore[call-overload]
    kv_heads = _NUM_KV_HEADS if has_window else _NUM_KV_HEADS // 2
    attention: Shapes = {
        "q_proj": (_NUM_HEADS * _MIMO_HEAD_DIM, HIDDEN),
        "k_proj": (kv_heads * _MIMO_HEAD_DIM, HIDDEN),
        "v_proj": (kv_heads * _HEAD_DIM, HIDDEN),
        "o_proj": (HIDDEN, _NUM_HEADS * _HEAD_DIM),
    }
    sinks: Shapes = {"self_attn.attention_sink_bias": (_NUM_HEADS,)} if has_window else {}
    return _weights(_layer(attention) | _mlp("mlp", _MLP_SIZE)) | sinks


def _cohere2(_config: Config, _index: int) -> Shapes:
    layer = _layer(_gqa_attention()) | _mlp("mlp", _MLP_SIZE)
    return _weights({name: shape for name, shape in layer.items() if name != "post_attention_layernorm"})


def _gpt_oss(_config: Config, _index: int) -> Shapes:
    attention = _gqa_attention(_GPT_OSS_HEAD_DIM)
    biases = {f"self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
    experts = {"gate_up_proj": (HIDDEN, 2 * _EXPERT_SIZE), "down_proj": (_EXPERT_SIZE, HIDDEN)}
    fused = {f"mlp.experts.{name}": (_NUM_EXPERTS, *shape) for name, shape in experts.items()}
    return {
        **_weights(_layer(attention) | {"mlp.router": (_NUM_EXPERTS, HIDDEN)}),
        **biases,
        "self_attn.sinks": (_NUM_HEADS,),
        "mlp.router.bias": (_NUM_EXPERTS,),
        **fused,
        **{f"{name}_bias": (shape[0], shape[2]) for name, shape in fused.items()},
    }


def _qwen3_next(config: Config, index: int) -> Shapes:
    experts = {name: shape for name, shape in _experts().items() if "shared_experts" not in name}
    experts |= _mlp("mlp.shared_expert", _EXPERT_SIZE) | {"mlp.shared_expert_gate": (1, HIDDEN)}
    if index == _NUM_LAYERS - 1:
        # After each query is the gate of its output.
        attention = _gqa_attention() | {"q_proj": (2 * _NUM_HEADS * _HEAD_DIM, HIDDEN)}
        return _weights(_layer(attention | {f"{part}_norm": (_HEAD_DIM,) for part in "qk"}) | experts)
    keys, values = _STATE_HEADS // 2 * _HEAD_DIM, _STATE_HEADS * _HEAD_DIM
    mixer: Shapes = {
        "in_proj_qkvz.weight": (2 * keys + 2 * values, HIDDEN),
        "in_proj_ba.weight": (2 * _STATE_HEADS, HIDDEN),
        "conv1d.weight": (2 * keys + values, 1, _CONV_WIDTH),
        "A_log": (_STATE_HEADS,),
        "dt_bias": (_STATE_HEADS,),
        "norm.weight": (_HEAD_DIM,),
        "out_proj.weight": (HIDDEN, values),
    }
    return _weights(_layer({}) | experts) | {f"linear_attn.{name}": shape for name, shape in mixer.items()}


def _qwen2_5_vl(_config: Config, _index: int) -> Shapes:
    attention = _gqa_attention()
    biases = {f"self_attn.{name}_proj.bias": attention[f"{name}_proj"][:1] for name in "qkv"}
    return _weights(_layer(attention) | _mlp("mlp", _MLP_SIZE)) | biases


_LAYERS: Final[dict[str, Callable[[Config, int], Shapes]]] = {
    "llama": _llama,
    "deepseek_v2": _deepseek,
    "deepseek_v32": _dsa,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "cohere2": _cohere2,
    "qwen2_5_vl": _qwen2_5_vl,
    "llama4": _llama4,
    "mimo_v2_flash": _mimo,
    "minimax_m2": _minimax,
    "qwen3_next": _qwen3_next,
}


def _weights(shapes: Shapes) -> Shapes:
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _layer(attention: Shapes) -> Shapes:
    parts = {f"self_attn.{name}": shape for name, shape in attention.items()}
    return {"input_layernorm": (HIDDEN,), **parts, "post_attention_layernorm": (HIDDEN,)}


def _gqa_attention(head_dim: int = _HEAD_DIM) -> Shapes:
    query, key = _NUM_HEADS * head_dim, _NUM_KV_HEADS * head_dim
    return {
        "q_proj": (query, HIDDEN),
        "k_proj": (key, HIDDEN),
        "v_proj": (key, HIDDEN),
        "o_proj": (HIDDEN, query),
    }


def _mla_attention() -> Shapes:
    return {
        "q_proj": (_NUM_HEADS * (_NOPE_DIM + _ROPE_DIM), HIDDEN),
        "kv_a_proj_with_mqa": (_LATENT_RANK + _ROPE_DIM, HIDDEN),
        "kv_a_layernorm": (_LATENT_RANK,),
        "kv_b_proj": (_NUM_HEADS * (_NOPE_DIM + _VALUE_DIM), _LATENT_RANK),
        "o_proj": (HIDDEN, _NUM_HEADS * _VALUE_DIM),
    }


def _experts() -> Shapes:
    shapes: Shapes = {"mlp.gate": (_NUM_EXPERTS, HIDDEN)}
    for expert in range(_NUM_EXPERTS):
        shapes |= _mlp(f"mlp.experts.{expert}", _EXPERT_SIZE)
    return shapes | _mlp("mlp.shared_experts", _EXPERT_SIZE)


def _mlp(prefix: str, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj": (width, HIDDEN),
        f"{prefix}.up_proj": (width, HIDDEN),
        f"{prefix}.down_proj": (HIDDEN, width),
    }
