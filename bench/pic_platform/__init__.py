"""A reference platform: SGLang on a machine with no accelerator and no compiled kernels, in plain PyTorch.

It runs, tests and demonstrates the whole server anywhere, and is not a fast CPU engine. Every operator is SGLang's own
native PyTorch fallback, except attention, which is `pic_cpu`: an extend computes only the new queries, so that a prefix
hit saves the work it should, and several sequences of a batch may share one row of the page table. Layers may have
windows, capped scores and attention sinks; anything but causal MHA, GQA or MLA is refused when the server starts.

SGLang imports this package in every process of every server, with or without a GPU, so importing it must be cheap:
neither torch nor SGLang is imported here.
"""

from __future__ import annotations

import importlib.util
import logging
import os

__all__ = ["ATTENTION_BACKEND", "PLATFORM_CLASS", "activate"]

ATTENTION_BACKEND = "pic_cpu"
"""Name of the attention backend, as `--attention-backend` takes it."""

PLATFORM_CLASS = "pic_platform.cpu.PicCpuPlatform"

logger = logging.getLogger(__name__)

_ACCELERATORS = ("cuda", "xpu", "npu", "musa", "mps", "hpu", "mlu", "gcu")


def activate() -> str | None:
    """The entry point of `sglang.srt.platforms`: the class to use on this machine, or None to leave SGLang its choice.

    Returns:
        `PLATFORM_CLASS` where torch sees no accelerator, and None where it sees one, where
        `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU engine, or where another platform is named.
    """
    selected = os.environ.get("SGLANG_PLATFORM", "")
    if selected not in ("", "pic_cpu"):
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" and not selected:
        return None
    found = _find_accelerator()
    if found is not None:
        if selected:
            logger.warning("SGLANG_PLATFORM='pic_cpu' is ignored: torch sees the accelerator %r here.", found)
        return None
    from pic_platform import torchvision_shim

    torchvision_shim.install()
    return PLATFORM_CLASS


def _find_accelerator() -> str | None:
    """Name of the first kind of device, other than the CPU, that torch can use here."""
    import torch

    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        is_available = getattr(module, "is_available", None)
        if callable(is_available) and is_available():
            return name
    # Out-of-tree devices (Ascend, Gaudi, Moore Threads) extend torch only when their own package is imported.
    return next((name for name in ("torch_npu", "habana_frameworks", "torch_musa") if _is_installed(name)), None)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
