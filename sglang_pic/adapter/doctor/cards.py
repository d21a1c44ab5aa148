"""GPUs as SGLang's argument resolution sees them, so that the doctor can answer for a card that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from typing import Final
from unittest.mock import patch

from sglang_pic.errors import UnsupportedError

CARDS: Final = {"a100": (8, 0), "l40s": (8, 9), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}
"""CUDA's compute capability by name of the card; SGLang chooses its backends by it."""


@contextmanager
def pretend(name: str | None) -> Iterator[None]:
    """Make SGLang resolve arguments as on a card, or as on this machine if `name` is None.

    NOTE: needs a fresh process, in which SGLang keeps the card's platform: its modules ask once, when imported.

    Raises:
        UnsupportedError: SGLang has already detected its platform.
    """
    if name is None:
        yield
        return
    # Where the reference platform is the one that SGLang would find: that makes torchvision importable.
    for platform in entry_points(group="sglang.srt.platforms", name="pic_cpu"):
        platform.load()()
    from sglang.srt import platforms

    if "sglang.srt.server_args" in sys.modules and not platforms.current_platform.is_cuda():
        raise UnsupportedError(f"--card {name}: SGLang runs in this process already, on another platform.")
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    platforms.current_platform = CudaSRTPlatform()
    from sglang.srt.runtime_context import override_platform

    with ExitStack() as stack:
        stack.enter_context(override_platform(**_facts(*CARDS[name])))
        # Parts of SGLang ask torch instead of the platform.
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda *_: CARDS[name]))
        yield


def _facts(major: int, minor: int) -> dict[str, object]:
    """The platform facts that SGLang reads, as on a machine with CUDA 12.3 or later and all packages."""
    return {
        "is_cuda": True,
        "is_hip": False,
        "is_npu": False,
        "is_xpu": False,
        "is_musa": False,
        "is_mps": False,
        "has_flashinfer": True,
        "device_capability": (major, minor),
        "device_sm": 10 * major + minor,
        "is_sm90": major == 9,
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100": major == 10,
        "is_sm100_or_sm110": major in (10, 11),
        "is_sm110": major == 11,
        "is_sm120": major == 12,
        "is_blackwell": major in (10, 11, 12),
    }
