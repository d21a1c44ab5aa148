"""Splicing 1,500 tokens of a real model against computing them, on the same device and threads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from pic_bench.gpu.kernel_pool import Pool, Shape, make_window
from pic_bench.gpu.timing import Timing, take_turns
from sglang_pic.errors import BenchError

_TOKENS = 1_500
_REPEATS = 5


class PrefillTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A splice, of slots in random order, which is slowest, and a prefill in bf16, taken in turns."""

    model: str
    tokens: int
    prefill: Timing
    splice: Timing

    @property
    def share(self) -> float:
        """Time of the splice over that of the prefill."""
        return self.splice.p50_ms / self.prefill.p50_ms


def time_prefill(folder: Path, device: torch.device) -> PrefillTiming:
    """Prefill and splice 1,500 tokens of the model in `folder`, in bf16, through transformers.

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

    @torch.inference_mode()
    def prefill() -> None:
        # A server, too, wants the last token's logits only.
        model(input_ids, use_cache=True, logits_to_keep=1)

    computed, spliced = take_turns((prefill, lambda: pool.splice(window)), _REPEATS, device, limit_s=0, unlimited=2)
    return PrefillTiming(model=folder.resolve().name, tokens=_TOKENS, prefill=computed, splice=spliced)
