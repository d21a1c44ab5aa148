"""A LoRA adapter of seeded random weights for queries, keys and values of a Llama, for tests and measurements."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapter(folder: Path, seed: int, model: Path) -> Path:
    """Write an adapter of rank 8 for the model in a folder into `folder`, which is made; it changes every answer."""
    import torch
    from safetensors.torch import save_file

    dims, draw = json.loads((model / "config.json").read_text("utf8")), torch.Generator().manual_seed(seed)
    hidden, keys, queries = dims["hidden_size"], dims["num_key_value_heads"], dims["num_attention_heads"]
    head = dims.get("head_dim", hidden // queries)
    heads, weights = {"q_proj": queries, "k_proj": keys, "v_proj": keys}, {}
    for layer in range(dims["num_hidden_layers"]):
        for part, number in heads.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, hidden, generator=draw) / hidden**0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(number * head, 8, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": [*heads], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return folder
