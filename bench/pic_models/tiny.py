"""Small models with seeded random weights and SmolLM2's tokenizer, one of each family that is served.

The same recipe gives the same bytes on every machine: the numbers are scaled uniform draws of PCG64, which have no
rounding of their own. Queries and keys are drawn wide, so that attention is sharp and the next token depends on where
things stand. The output layer is not tied to the embedding, so that a greedy text does not repeat its last token; where
the family ties them, the embedding is small beside the layers' outputs.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator
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

_TABLES: Final[dict[str, Config]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf8"))
_IDS: Final[Config] = {
    "bos_token_id": smollm2.BOS_ID,
    "eos_token_id": smollm2.EOS_ID,
    "pad_token_id": smollm2.EOS_ID,
}


def _config(name: str) -> Config:
    """The configuration of a table of tiny.toml, with that of the table that it is like."""
    own = {key: value for key, value in _TABLES[name].items() if key != "like"}
    like = _TABLES[name].get("like")
    if like is None:
        return _IDS | {"max_position_embeddings": smollm2.CONTEXT_LEN} | own
    shared = checkpoint.DEEPSEEK_V2 if name == "deepseek_v2" else {}
    return shared | _config(str(like)) | own | _SHARED.get(name, {})


_SHARED: Final[dict[str, Config]] = {
    "deepseek_v2": {"rope_scaling": checkpoint.yarn(factor=4.0, original_len=2048, mscale=0.707)},
    "qwen2_5_vl": vision.TOKEN_IDS
    | {"vision_config": vision.VISION_CONFIG | {"out_hidden_size": _TABLES["common"]["hidden_size"]}},
}


def _sizes(table: str, *keys: str) -> Iterator[int]:
    return (int(str(_TABLES[table][key])) for key in keys)


_VOCAB_SIZE, HIDDEN, _NUM_LAYERS = _sizes("common", "vocab_size", "hidden_size", "num_hidden_layers")
_NUM_HEADS, _MLP_SIZE = _sizes("common", "num_attention_heads", "intermediate_size")
_NUM_KV_HEADS, _HEAD_DIM = _sizes("llama", "num_key_value_heads", "head_dim")
_LATENT_RANK, _NOPE_DIM, _ROPE_DIM = _sizes("deepseek_v2", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
_VALUE_DIM, _NUM_EXPERTS, _EXPERT_SIZE = _sizes(
    "deepseek_v2", "v_head_dim", "n_routed_experts", "moe_intermediate_size"
)
_QUERY_RANK, _INDEX_HEADS, _INDEX_DIM = _sizes("deepseek_v32", "q_lora_rank", "index_n_heads", "index_head_dim")
(_GPT_OSS_HEAD_DIM,), (_MIMO_HEAD_DIM,) = _sizes("gpt_oss", "head_dim"), _sizes("mimo_v2_flash", "head_dim")
_STATE_HEADS, _CONV_WIDTH = _sizes("qwen3_next", "linear_num_value_heads", "linear_conv_kernel_dim")

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


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes and options of a model with random weights."""

    seed: int
    config: Config
    """The Hugging Face `config.json`."""


_LLAMA4: Final[Config] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": _config("llama4_text"),
    **_IDS,
}
RECIPES: dict[str, Recipe] = {
    "tiny-gqa": Recipe(seed=20_260, config=_config("llama")),
    "tiny-mla": Recipe(seed=20_261, config=_config("deepseek_v2")),
    "tiny-gemma3": Recipe(seed=20_262, config=_config("gemma3_text")),
    "tiny-gpt-oss": Recipe(seed=20_263, config=_config("gpt_oss")),
    "tiny-cohere2": Recipe(seed=20_264, config=_config("cohere2")),
    "tiny-dsa": Recipe(seed=20_265, config=_config("deepseek_v32")),
    "tiny-qwen2.5-vl": Recipe(seed=20_266, config=_config("qwen2_5_vl")),
    "tiny-llama4": Recipe(seed=20_267, config=_LLAMA4),
    "tiny-minimax": Recipe(seed=20_268, config=_config("minimax_m2")),
    "tiny-qwen3-next": Recipe(seed=20_269, config=_config("qwen3_next")),
}

MIMO: Final = Recipe(seed=20_266, config=_config("mimo_v2_flash"))
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
