"""Owns one comparison: splicing 1,500 tokens of a model against computing them, on the same device and threads.

It must not know the other shapes. The prefill is the real model's, through transformers; its KV shape is read from its
config.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import msgspec
import torch

from pic_bench.kernel_pool import Pool, Shape, make_window
from sglang_pic.errors import BenchError

__all__ = ["PrefillTiming", "time_prefill"]

_TOKENS = 1_500
_REPEATS = 5


class PrefillTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Medians, in milliseconds, of a splice and of a prefill taken in turns."""

    model: str
    tokens: int
    layers: int
    dtype: str
    threads: int
    prefill_ms: float
    splice_ms: float
    """Slots in random order, the slowest."""
    prefill_samples_ms: list[float]
    splice_samples_ms: list[float]

    @property
    def share(self) -> float:
        """Time of the splice over that of the prefill."""
        return self.splice_ms / self.prefill_ms

    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.model}, {self.tokens:,} tokens, {self.layers} layers, {self.dtype}, {self.threads} threads: "
            f"spliced in {self.splice_ms:.1f} ms, computed in {self.prefill_ms:.0f} ms: {self.share:.2%}."
        )


def time_prefill(folder: Path, device: torch.device) -> PrefillTiming:
    """Prefill and splice 1,500 tokens of the model in `folder`, in bf16.

    Raises:
        BenchError: the folder holds no model with plain multi-head keys and values.
    """
    from sglang_pic.platform import torchvision_shim

    # Before transformers, which imports torchvision; a CUDA build of that is common beside a CPU build of torch.
    torchvision_shim.install()
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        config = model.config
        heads, dim = config.num_key_value_heads, config.head_dim
    except (OSError, ValueError, AttributeError) as error:
        raise BenchError(f"--prefill {folder}: no model with num_key_value_heads and head_dim: {error}") from error
    shape = Shape(layers=config.num_hidden_layers, heads=heads, dim=dim, rotary_dim=dim)
    pool = Pool(shape, shape.layers, 4 * _TOKENS, device)
    window = make_window(pool, "scattered", _TOKENS, 0)
    pool.check(window, str(folder))
    input_ids = (torch.arange(_TOKENS, device=device) * 7_919 % config.vocab_size)[None]
    prefills, splices = [], []
    for _ in range(1 + _REPEATS):
        with torch.inference_mode():
            begin = time.perf_counter()
            # Like a server, that wants the last token's logits only.
            model(input_ids, use_cache=True, logits_to_keep=1)
            _wait_for(device)
            prefills.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        pool.splice(window)
        _wait_for(device)
        splices.append(time.perf_counter() - begin)
    return PrefillTiming(
        model=folder.resolve().name,
        tokens=_TOKENS,
        layers=shape.layers,
        dtype="bfloat16",
        threads=torch.get_num_threads(),
        prefill_ms=1e3 * median(prefills[1:]),
        splice_ms=1e3 * median(splices[1:]),
        prefill_samples_ms=[1e3 * value for value in prefills[1:]],
        splice_samples_ms=[1e3 * value for value in splices[1:]],
    )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
