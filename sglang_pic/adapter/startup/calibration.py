"""The cost gate, learnt at start-up: what a computed token, a spliced token and a gap cost on this machine and model.

Four passes are timed on the live model before the first request: an extend of few and of many tokens, the same tokens
as many virtual sequences, and a splice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sglang_pic.adapter.probe.extend import trial_batch, trial_forward
from sglang_pic.adapter.probe.ranks import agree_on_largest
from sglang_pic.adapter.seams import ModelRunner, TpGroup
from sglang_pic.core import CostModel
from sglang_pic.runtime.splice import Splicer

_FEW, _MANY, _SEQUENCES = 32, 256, 9
_SPLICED = 256
_REPEATS = 5


def calibrate(runner: ModelRunner, splicer: Splicer, max_sequences: int, tp_group: TpGroup | None) -> CostModel:
    """Measure the costs on `runner`; all ranks of `tp_group` must call it together.

    Args:
        runner: SGLang's model runner, its pool still empty.
        splicer: bound to the runner's pool.
        max_sequences: most sequences of one batch, 2 or more.
        tp_group: SGLang's tensor-parallel group, or `None` for one rank.

    Returns:
        The cost model of the slowest rank, because every rank must plan alike. A second or two on a CPU, milliseconds
        on a GPU.
    """
    size = runner.token_to_kv_pool_allocator.size
    sequences = min(_SEQUENCES, max_sequences)
    many, spliced = min(_MANY, size // 4), min(_SPLICED, size // 4)
    few = min(_FEW, many // 2)
    split = [many // sequences + (i < many % sequences) for i in range(sequences)]
    device = torch.device(runner.device)

    def splice() -> None:
        # The rows are not anyone's yet; slot 0 is the padding slot.
        src = torch.arange(1, spliced + 1, dtype=torch.int64, device=device)
        splicer.splice(src, src + spliced, torch.full_like(src, 7))

    def extend_us(lens: list[int]) -> float:
        return _shortest_us(lambda: trial_forward(runner, trial_batch(runner, lens)), device)

    times = [extend_us([few]), extend_us([many]), extend_us(split), _shortest_us(splice, device)]
    few_us, many_us, split_us, splice_us = agree_on_largest(torch.tensor(times, dtype=torch.float64), tp_group).tolist()
    return CostModel(
        computed_token_us=max(0.0, (many_us - few_us) / (many - few)),
        spliced_token_us=splice_us / spliced,
        gap_us=max(0.0, (split_us - many_us) / (sequences - 1)),
    )


def _shortest_us(run: Callable[[], object], device: torch.device) -> float:
    # Whatever else runs on the machine only adds to a time, so the shortest of several counts.
    run()
    times, module = [], torch.get_device_module(device)
    for _ in range(_REPEATS):
        module.synchronize(device)
        started_at = time.perf_counter()
        run()
        module.synchronize(device)
        times.append(time.perf_counter() - started_at)
    return 1e6 * min(times)
