"""The vision tower and the image processor of a small model of the Qwen2.5-VL family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, TypeAlias

from pic_models.checkpoint import Config

Shapes: TypeAlias = dict[str, tuple[int, ...]]

_WIDTH, _DEPTH, _MLP_SIZE, _PATCH, _MERGE, _TEMPORAL = 64, 2, 128, 14, 2, 2

# Names of SmolLM2's special tokens that are unused here, and the family's names for them.
_TOKENS: Final = {
    "<repo_name>": "<|vision_start|>",
    "<reponame>": "<|vision_end|>",
    "<file_sep>": "<|image_pad|>",
    "<filename>": "<|video_pad|>",
}
TOKEN_NAMES: Final = ("vision_start_token", "vision_end_token", "image_token", "video_token")
TOKEN_IDS: Final = {f"{name}_id": number for number, name in enumerate(TOKEN_NAMES, start=3)}
"""Where the tokens are in SmolLM2's vocabulary, as a configuration says it."""

VISION_CONFIG: Final[Config] = {
    "model_type": "qwen2_5_vl",
    "depth": _DEPTH,
    "fullatt_block_indexes": [1],
    "hidden_act": "silu",
    "hidden_size": _WIDTH,
    "in_channels": 3,
    "intermediate_size": _MLP_SIZE,
    "num_heads": 2,
    "patch_size": _PATCH,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": _TEMPORAL,
    "tokens_per_second": 2,
    "window_size": 4 * _PATCH * _MERGE,
}

_IMAGE_PROCESSOR: Final[Config] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_pixels": 512 * 512,
    "merge_size": _MERGE,
    "min_pixels": 4 * (_PATCH * _MERGE) ** 2,
    "patch_size": _PATCH,
    "temporal_patch_size": _TEMPORAL,
}


def tower(out: int) -> Shapes:
    """Names and shapes of the tower's tensors; `out` is the width of the language model."""
    merged = _WIDTH * _MERGE**2
    shapes: Shapes = {"visual.patch_embed.proj.weight": (_WIDTH, 3, _TEMPORAL, _PATCH, _PATCH)}
    for index in range(_DEPTH):
        linear = {
            "attn.qkv": (3 * _WIDTH, _WIDTH),
            "attn.proj": (_WIDTH, _WIDTH),
            "mlp.gate_proj": (_MLP_SIZE, _WIDTH),
            "mlp.up_proj": (_MLP_SIZE, _WIDTH),
            "mlp.down_proj": (_WIDTH, _MLP_SIZE),
        }
        block = f"visual.blocks.{index}"
        shapes |= {f"{block}.norm{number}.weight": (_WIDTH,) for number in (1, 2)}
        shapes |= {f"{block}.{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{block}.{name}.bias": shape[:1] for name, shape in linear.items()}
    shapes["visual.merger.ln_q.weight"] = (_WIDTH,)
    for number, width in ((0, merged), (2, out)):
        shapes[f"visual.merger.mlp.{number}.weight"] = (width, merged)
        shapes[f"visual.merger.mlp.{number}.bias"] = (width,)
    return shapes


def write_processor(target: Path) -> None:
    """Write the image processor, and give the tokenizer in `target` the family's tokens."""
    (target / "preprocessor_config.json").write_text(json.dumps(_IMAGE_PROCESSOR, indent=2) + "\n")
    path = target / "tokenizer.json"
    text = path.read_text()
    for given, name in _TOKENS.items():
        text = text.replace(json.dumps(given), json.dumps(name))
    path.write_text(text)
