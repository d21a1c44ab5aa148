"""Collectives of tensor-parallel ranks on the CPU group: the largest of their numbers, and digests of their inputs.

Every rank makes its own plans, and ranks with different plans would run forward passes that do not match. With DP
attention only the ranks that serve the same requests must agree; during start-up all ranks run the same passes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic

import torch

from sglang_pic.adapter.sglang.seams import BuildContext, TpGroup
from sglang_pic.errors import ContractError, UnsupportedError


def agree_on_largest(values: torch.Tensor, tp_group: TpGroup | None) -> torch.Tensor:
    """The largest of each value over the ranks of `tp_group`, in place; all ranks must call this together.

    Args:
        values: on the CPU.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.
    """
    if tp_group is not None and tp_group.world_size > 1:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=tp_group.cpu_group)
    return values


def sum_over_ranks(values: torch.Tensor, tp_group: TpGroup | None) -> torch.Tensor:
    """The sum of each value, on the CPU, over the ranks of `tp_group`, in place; all ranks must call this together."""
    if tp_group is not None and tp_group.world_size > 1:
        torch.distributed.all_reduce(values, group=tp_group.cpu_group)
        # Ranks must choose alike, whatever order they added up in.
        torch.distributed.broadcast(values, tp_group.ranks[0], group=tp_group.cpu_group)
    return values


def agreed_time(tp_group: TpGroup | None) -> float:
    """Seconds of a monotonic clock, the same on every rank of `tp_group`; all ranks must call this together."""
    return float(agree_on_largest(torch.tensor([monotonic()], dtype=torch.float64), tp_group))


def check_alike(read: Mapping[str, bytes], tp_group: TpGroup | None) -> None:
    """Check that every rank read the same; all ranks must call this together, with the same names in the same order.

    Args:
        read: this rank's contents by name.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.

    Raises:
        UnsupportedError: contents differ; raised on every rank, with one message.
    """
    if tp_group is None or tp_group.world_size == 1:
        return
    everyone = _gather([_digest(content) for content in read.values()], tp_group.cpu_group)
    for place, name in enumerate(read):
        odd = [rank for rank, digests in enumerate(everyone) if digests[place] != everyone[0][place]]
        if odd:
            raise UnsupportedError(
                f"tensor-parallel ranks {odd} and rank 0 read different {name}, and would plan differently: give every "
                "rank the same SGLANG_PIC_CONFIG and the same tokenizer files (--tokenizer-path); if a rank could read "
                "no tokenizer, a warning above says so."
            )


def all_digests(content: bytes, tp_group: TpGroup | None) -> list[int]:
    """A digest of each rank's `content`; all ranks must call this together."""
    if tp_group is None or tp_group.world_size == 1:
        return [_digest(content)]
    return [digest for (digest,) in _gather([_digest(content)], tp_group.cpu_group)]


def _gather(values: list[int], group: torch.distributed.ProcessGroup) -> list[list[int]]:
    mine = torch.tensor(values, dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(everyone, mine, group=group)
    return [each.tolist() for each in everyone]


class FaultGroup:
    """Ranks that exchange faults, over a process group of their own.

    All ranks of the server must make it together. `size` consecutive ranks serve the same requests, by default all. A
    rank waits `timeout_s` for the others to have the same fault; they are within one pass of each other.
    """

    def __init__(self, size: int | None = None, *, timeout_s: float = 60.0) -> None:
        self._group: torch.distributed.ProcessGroup
        self._group, _ = torch.distributed.new_subgroups(
            size or torch.distributed.get_world_size(), backend="gloo", timeout=timedelta(seconds=timeout_s)
        )

    def check(self, fault: str) -> None:
        """Return if every rank has the same fault as this one.

        Raises:
            ContractError: another rank has another fault, or none; the server must end.
        """
        digest = _digest(fault.encode())
        try:
            everyone = _gather([digest], self._group)
        except RuntimeError as error:
            raise ContractError(_not_alike(fault)) from error
        if any(each != [digest] for each in everyone):
            raise ContractError(_not_alike(fault))


def fault_group(group: TpGroup | None) -> FaultGroup | None:
    """The ranks of `group`, which serve the same requests; all ranks of the server must call this together."""
    return None if group is None or group.world_size == 1 else FaultGroup(group.world_size)


def serving_group(tp_group: TpGroup | None) -> TpGroup | None:
    """The ranks of `tp_group` that serve the same requests as this one: all, but with DP attention."""
    from sglang.srt.runtime_context import get_parallel

    if tp_group is None or tp_group.world_size == 1 or not get_parallel().attn_dp_enabled:
        return tp_group
    group: TpGroup = get_parallel().attn_tp_group
    return group


def metric_labels(ctx: BuildContext) -> dict[str, str] | None:
    """SGLang's rank labels; `None` on all but the first of the ranks that count the same requests."""
    if not ctx.server_args.enable_metrics:
        return None
    from sglang.srt.runtime_context import get_parallel, get_serving

    ranks = serving_group(ctx.tp_group)
    if ranks is not None and ranks.rank_in_group != 0:
        return None
    dp_rank = get_parallel().dp_rank
    replica = {} if dp_rank is None else {"dp_rank": str(dp_rank)}
    return {"model_name": get_serving().served_model_name, "tp_rank": str(ctx.tp_rank), **replica}


def _not_alike(fault: str) -> str:
    return (
        f"tensor-parallel rank {torch.distributed.get_rank()} had the fault '{fault}' and another rank had not: this "
        "rank would compute rows that the others splice, so the server ends. The log above has the fault."
    )


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)
