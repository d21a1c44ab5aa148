"""The check of `make gpu` that rows moved rightly: right ones pass, and every way to move them wrongly fails it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pic_bench.gpu import kernel_pool
from pic_bench.gpu.moves import LAYOUTS, check_moves
from targets import HOST, Target, fused

from sglang_pic.errors import BenchError

GQA, MLA = LAYOUTS["NeoX"], LAYOUTS["MLA"]


@fused
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_rows_pass(target: Target, layout: str) -> None:
    assert 0 < check_moves(LAYOUTS[layout], torch.bfloat16, 33, 5, torch.device(target.device)) <= 1


def wrong_ways() -> dict[str, Callable[..., None]]:
    """Splices of keys and values that are wrong, each in one way."""
    right = kernel_pool.splice_mha

    def unmoved(keys: Any, values: Any, src: Any, dst: Any, shifts: Any, rope: Any) -> None:
        pass

    def unrotated(keys: Any, values: Any, src: Any, dst: Any, shifts: Any, rope: Any) -> None:
        right(keys, values, src, dst, torch.zeros_like(shifts), rope)

    def other_rows(keys: Any, values: Any, src: Any, dst: Any, shifts: Any, rope: Any) -> None:
        right(keys, values, src.roll(1), dst, shifts, rope)

    def stale_values(keys: Any, values: Any, src: Any, dst: Any, shifts: Any, rope: Any) -> None:
        before = values[0].clone()
        right(keys, values, src, dst, shifts, rope)
        values[0].copy_(before)

    def written_beside(keys: Any, values: Any, src: Any, dst: Any, shifts: Any, rope: Any) -> None:
        right(keys, values, src, dst, shifts, rope)
        taken = torch.cat((src, dst))
        beside = next(slot for slot in range(len(keys[0])) if slot not in taken)
        keys[0][beside : beside + 8] += 1

    def one_too_far(keys: Any, values: Any, src: Any, dst: Any, shifts: Any, rope: Any) -> None:
        right(keys, values, src, dst, shifts + 1, rope)

    ways = (unmoved, unrotated, other_rows, stale_values, written_beside, one_too_far)
    return {way.__name__: way for way in ways}


@pytest.mark.parametrize("name", wrong_ways())
def test_wrong_rows_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("triton")
    with target.active():
        monkeypatch.setattr(kernel_pool, "splice_mha", wrong_ways()[name])
        with pytest.raises(BenchError, match=r"differ|changed|off by"):
            check_moves(GQA, torch.float32, 33, 5, torch.device("cpu"))


def test_another_kernel_than_the_fused_one_is_a_failure() -> None:
    with HOST.active(), pytest.raises(BenchError, match="served by host, not by the fused kernel"):
        check_moves(MLA, torch.bfloat16, 33, 5, torch.device("cpu"))
