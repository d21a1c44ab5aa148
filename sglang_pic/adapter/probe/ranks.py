"""What tensor-parallel ranks say to each other before they go on: the largest of their numbers, or that all read alike.

Every rank plans for itself, and plans that differ end in a forward pass whose ranks do not match. Owns the collectives
of this plugin, all of them on the CPU group. It must not know what the numbers and the texts mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from sglang_pic.errors import UnsupportedError

__all__ = ["agree_on_largest", "check_alike"]


def agree_on_largest(values: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """Each value's largest over the ranks of SGLang's `tp_group`, in place; ranks must call it together."""
    if tp_group is not None and tp_group.world_size > 1:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=tp_group.cpu_group)
    return values


def check_alike(read: Mapping[str, bytes], tp_group: Any) -> None:
    """Check that every rank read the same; ranks must call it together, with the same names in the same order.

    Args:
        read: what this rank read, by the name that an error gives it.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.

    Raises:
        UnsupportedError: on every rank, in the same words.
    """
    if tp_group is None or tp_group.world_size == 1:
        return
    mine = torch.tensor([_digest(content) for content in read.values()], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(tp_group.world_size)]
    torch.distributed.all_gather(everyone, mine, group=tp_group.cpu_group)
    for place, name in enumerate(read):
        odd = [rank for rank, digests in enumerate(everyone) if digests[place] != everyone[0][place]]
        if odd:
            raise UnsupportedError(
                f"tensor-parallel ranks {odd} and rank 0 read different {name}, and would plan differently: give every "
                "rank the same SGLANG_PIC_CONFIG and the same tokenizer files (--tokenizer-path); a warning above says "
                "so where a rank could read no tokenizer."
            )


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)
