"""Makes `smollm2-mla`: SmolLM2-135M-Instruct with its attention converted to DeepSeek-V2's, everything else as it was.

Owns the checkpoint's configuration and names, and what the conversion is measured on. The algebra is `mla_layer`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_pic.models import smollm2
from sglang_pic.models.sample_text import PASSAGES

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from sglang_pic.models.mla_layer import GroupedAttention, MlaShape

__all__ = ["collect_moments", "convert_weights", "fingerprint", "write"]

_CONVERSION_VERSION = 1
"""Raise when `write` writes something else from the same source."""

_TEXT_LEN = 512
"""Tokens of each text that the activations are measured on."""

_NUM_ROTATIONS = 2
"""How often the passages are told in another order, so that each is met in several contexts."""

_Json = str | int | float | bool | None | dict[str, str | float | int] | list[str]


def fingerprint() -> str:
    """Identifies the source model, the text it is measured on and the conversion."""
    import xxhash

    text = xxhash.xxh3_128_hexdigest("\n".join(PASSAGES).encode())
    return f"mla:v{_CONVERSION_VERSION}:{text}:{smollm2.fingerprint()}"


def write(target: Path, progress: Callable[[str], None]) -> None:
    """Convert the model into the empty folder `target`."""
    from safetensors.torch import save_file

    from sglang_pic.models.mla_layer import MlaShape

    model = smollm2.load(progress).float().eval()
    smollm2.write_tokenizer(target, progress)
    shape = MlaShape()
    progress("smollm2-mla: measuring activations")
    moments = collect_moments(model, _texts(target))
    progress("smollm2-mla: converting the attention")
    weights = convert_weights(model, moments, shape, progress)
    (target / "config.json").write_text(json.dumps(_config(model.config, shape), indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def collect_moments(model: LlamaForCausalLM, texts: list[torch.Tensor]) -> torch.Tensor:
    """Mean of `x x^T` over the inputs of every layer's attention, normalised and without the norm's weight.

    Args:
        model: In float32, on the CPU.
        texts: Token ids `[text_len]` each.

    Returns:
        `[num_layers, hidden, hidden]`, float64.
    """
    import torch

    hidden, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    moments = torch.zeros(num_layers, hidden, hidden, dtype=torch.float64)

    def hook(index: int) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def add(_norm: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].flatten(0, 1).double()
            rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
            moments[index] += rows.T @ rows

        return add

    handles = [
        layer.input_layernorm.register_forward_pre_hook(hook(index)) for index, layer in enumerate(model.model.layers)
    ]
    try:
        with torch.no_grad():
            for text in texts:
                model.model(text[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return moments / sum(len(text) for text in texts)


def convert_weights(
    model: LlamaForCausalLM, moments: torch.Tensor, shape: MlaShape, progress: Callable[[str], None]
) -> dict[str, torch.Tensor]:
    """The tensors of the converted checkpoint by name, in bf16; the output layer is the embedding and is left out."""
    import torch

    from sglang_pic.models import mla_layer

    weights: dict[str, torch.Tensor] = {}
    missing = 0.0
    for index, layer in enumerate(model.model.layers):
        new = mla_layer.convert(_attention(model, index), moments[index], shape)
        missing = max(missing, new.missing_energy)
        prefix = f"model.layers.{index}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones_like(layer.input_layernorm.weight),
            f"{prefix}.self_attn.q_proj.weight": new.q_proj,
            f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": new.kv_a_proj,
            f"{prefix}.self_attn.kv_a_layernorm.weight": torch.ones(shape.latent_rank),
            f"{prefix}.self_attn.kv_b_proj.weight": new.kv_b_proj,
            f"{prefix}.self_attn.o_proj.weight": new.o_proj,
        }
    progress(f"smollm2-mla: at most {missing:.2%} of a layer's input energy is outside its latent")
    kept = {
        name: weight
        for name, weight in model.state_dict().items()
        if ".self_attn." not in name and name not in weights and name != "lm_head.weight"
    }
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in (weights | kept).items()}


def _attention(model: LlamaForCausalLM, index: int) -> GroupedAttention:
    from sglang_pic.models.mla_layer import GroupedAttention

    layer, head_dim = model.model.layers[index], model.config.head_dim
    norm = layer.input_layernorm.weight.detach().double()

    def heads(projection: torch.nn.Linear) -> torch.Tensor:
        return (projection.weight.detach().double() * norm).unflatten(0, (-1, head_dim))

    attention = layer.self_attn
    return GroupedAttention(
        query=heads(attention.q_proj),
        key=heads(attention.k_proj),
        value=heads(attention.v_proj),
        output=attention.o_proj.weight.detach().double(),
    )


def _texts(tokenizer_dir: Path) -> list[torch.Tensor]:
    """The sample text in pieces of `_TEXT_LEN` tokens, without the last, shorter one."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    step = len(PASSAGES) // _NUM_ROTATIONS
    passages = [
        passage for turn in range(_NUM_ROTATIONS) for passage in (*PASSAGES[turn * step :], *PASSAGES[: turn * step])
    ]
    tokens = torch.tensor(tokenizer("\n".join(passages))["input_ids"])
    return [text for text in tokens.split(_TEXT_LEN) if len(text) == _TEXT_LEN]


def _config(source: LlamaConfig, shape: MlaShape) -> dict[str, _Json]:
    """The Hugging Face `config.json`: DeepSeek-V2 with dense layers only."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": smollm2.BOS_ID,
        "dtype": "bfloat16",
        "eos_token_id": smollm2.EOS_ID,
        # No layer has experts. Their number and sizes must be there, because readers compute with them.
        "first_k_dense_replace": source.num_hidden_layers,
        "hidden_act": source.hidden_act,
        "hidden_size": source.hidden_size,
        "initializer_range": source.initializer_range,
        "intermediate_size": source.intermediate_size,
        "kv_lora_rank": shape.latent_rank,
        "max_position_embeddings": source.max_position_embeddings,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": False,
        "num_attention_heads": source.num_attention_heads,
        "num_experts_per_tok": 2,
        "num_hidden_layers": source.num_hidden_layers,
        "num_key_value_heads": source.num_attention_heads,
        "pad_token_id": smollm2.EOS_ID,
        "q_lora_rank": None,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": source.head_dim,
        "rms_norm_eps": source.rms_norm_eps,
        # SGLang's CPU platform knows no other rotary embedding for MLA; at factor 1 it is the plain one.
        "rope_scaling": {
            "type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": source.max_position_embeddings,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rope_theta": source.rope_parameters["rope_theta"],
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": True,
        "topk_group": 1,
        "topk_method": "greedy",
        "use_cache": True,
        "v_head_dim": shape.value_dim,
        "vocab_size": source.vocab_size,
    }
