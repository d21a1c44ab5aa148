"""Server flags that SGLang has renamed and that recipes still use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RENAMED: Final = {
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--enable-deepep-moe": "--moe-a2a-backend deepep",
    "--enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--keep-mm-feature-on-device": "--mm-feature-transport cuda_ipc",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--prefill-round-robin-balance": "--load-balance-method round_robin",
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
}
"""The new flag by the old name; it includes a value if the old flag had none."""


def renewed(flags: Sequence[str]) -> list[str]:
    """The flags with their current names."""
    found = list[str]()
    for flag, before in zip(flags, ["", *flags], strict=False):
        name, equals, value = flag.partition("=")
        new = "dsa" if name == "nsa" and before.endswith("attention-backend") else RENAMED.get(name)
        found += [flag] if new is None else f"{new}{equals}{value}".split()
    return found
