"""A LoRA adapter of seeded random weights for queries, keys and values of a Llama, for tests and measurements."""

from __future__ import annotations

import json
from pathlib import Path

_RANK = 8


def write_adapter(folder: Path, seed: int, model: Path) -> Path:
    """Write an adapter of rank 8 that changes a model's answers.

    Args:
        folder: made if it is not there; what it holds is overwritten.
        seed: of the weights.
        model: a folder with the `config.json` of a Llama.

    Returns:
        `folder`.
    """
    import torch
    from safetensors.torch import save_file

    dims, draw = json.loads((model / "config.json").read_text("utf8")), torch.Generator().manual_seed(seed)
    hidden, queries, keys = (
        dims["hidden_size"],
        dims["num_attention_heads"] * dims["head_dim"],
        dims["num_key_value_heads"] * dims["head_dim"],
    )
    weights = {}
    for layer in range(dims["num_hidden_layers"]):
        for part, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=draw) / hidden**0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(size, _RANK, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj"]
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return folder
