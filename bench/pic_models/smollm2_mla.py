"""Makes `smollm2-mla`: SmolLM2-135M-Instruct with its attention converted to DeepSeek-V2's, everything else as it was.

`mla_layer` has the algebra.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from pic_models import checkpoint, smollm2
from pic_models.checkpoint import Config, Progress

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pic_models.mla_layer import GroupedAttention, MlaShape

_CONVERSION_VERSION = 1
"""Raise when `write` writes something else from the same source."""

_TEXT_LEN = 512
"""Tokens of each text that the activations are measured on."""

_NUM_ROTATIONS = 2
"""How often the passages are told, each time in another order, so that each is met in several contexts."""


def fingerprint() -> str:
    """Identifies the source model, the text it is measured on and the conversion."""
    import xxhash

    text = xxhash.xxh3_128_hexdigest("\n".join(passages()).encode())
    return f"mla:v{_CONVERSION_VERSION}:{text}:{smollm2.fingerprint()}"


def passages() -> list[str]:
    """The text that activations are measured on: prose, dialogue, code, figures, tables and names.

    The conversion depends on it, so a change of the text is a change of the converted model.
    """
    return resources.files(__package__).joinpath("sample_text.txt").read_text(encoding="utf-8").split("%\n")


def write(target: Path, progress: Progress) -> None:
    """Convert the model into the empty folder `target`."""
    from pic_models.mla_layer import MlaShape

    model = smollm2.load(progress).float().eval()
    smollm2.write_tokenizer(target, progress)
    shape = MlaShape()
    progress("smollm2-mla: measuring activations")
    moments = collect_moments(model, _texts(target))
    progress("smollm2-mla: converting the attention")
    weights = convert_weights(model, moments, shape, progress)
    model.generation_config.save_pretrained(target)
    checkpoint.write(target, _config(model.config, shape), weights)


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
    with torch.no_grad():
        for text in texts:
            states = model.model(text[None], use_cache=False, output_hidden_states=True).hidden_states
            # The last of them is the output of the model.
            for moment, state in zip(moments, states[:-1], strict=True):
                rows = state.flatten(0, 1).double()
                rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
                moment.add_(rows.T @ rows)
    return moments / sum(len(text) for text in texts)


def convert_weights(
    model: LlamaForCausalLM, moments: torch.Tensor, shape: MlaShape, progress: Progress
) -> dict[str, torch.Tensor]:
    """The tensors of the converted checkpoint by name; the output layer is the embedding and is left out."""
    import torch

    from pic_models import mla_layer

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
    return weights | kept


def _attention(model: LlamaForCausalLM, index: int) -> GroupedAttention:
    from pic_models.mla_layer import GroupedAttention

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
    told = passages()
    step = len(told) // _NUM_ROTATIONS
    text = "\n".join("\n".join(told[turn * step :] + told[: turn * step]) for turn in range(_NUM_ROTATIONS))
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    return [text for text in tokens.split(_TEXT_LEN) if len(text) == _TEXT_LEN]


def _config(source: LlamaConfig, shape: MlaShape) -> Config:
    """DeepSeek-V2 with dense layers only."""
    kept = (
        *("hidden_act", "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings"),
        *("num_attention_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size"),
    )
    return checkpoint.DEEPSEEK_V2 | {
        **{name: getattr(source, name) for name in kept},
        "bos_token_id": smollm2.BOS_ID,
        "eos_token_id": smollm2.EOS_ID,
        "first_k_dense_replace": source.num_hidden_layers,
        "kv_lora_rank": shape.latent_rank,
        "num_key_value_heads": source.num_attention_heads,
        "pad_token_id": smollm2.EOS_ID,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": source.head_dim,
        # SGLang's CPU platform knows no other rotary embedding for MLA; at factor 1 it is the plain one.
        "rope_scaling": checkpoint.yarn(factor=1.0, original_len=source.max_position_embeddings, mscale=1.0),
        "rope_theta": source.rope_parameters["rope_theta"],
        "tie_word_embeddings": True,
        "v_head_dim": shape.value_dim,
    }
