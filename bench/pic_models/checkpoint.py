"""The common parts of the written checkpoints: DeepSeek-V2's configuration, and the files of a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import torch

Config: TypeAlias = dict[str, object]
"""The Hugging Face `config.json`."""

Progress: TypeAlias = Callable[[str], None]
"""Takes one line of text per step of the work."""

DEEPSEEK_V2: Final[Config] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    # Readers compute with the number and sizes of experts even where no layer has any.
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "use_cache": True,
}
"""The settings that are the same for all sizes of model."""


def yarn(*, factor: float, original_len: int, mscale: float) -> Config:
    """A `rope_scaling` of YaRN as DeepSeek configures it."""
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original_len,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


def write(target: Path, config: Config, weights: Mapping[str, torch.Tensor]) -> None:
    """Write `config.json` and the weights, in bf16, into the folder `target`."""
    import torch
    from safetensors.torch import save_file

    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    rounded = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(rounded, target / "model.safetensors", metadata={"format": "pt"})
