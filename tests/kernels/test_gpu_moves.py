"""The check of `make gpu` that rows moved rightly: right ones pass, and every way to move them wrongly fails it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pic_bench.gpu.moves import LAYOUTS, check_moves

from sglang_pic.errors import BenchError
from sglang_pic.runtime import row_groups as splice
from tests.helpers.splice_cases import EAGER, Target

GQA, MLA = LAYOUTS["NeoX"], LAYOUTS["MLA"]
Move = Callable[..., None]


def stale_values(move: Move, keys: Any, values: Any, *slots: Any) -> None:
    before = values[0].clone()
    move(keys, values, *slots)
    values[0].copy_(before)


def written_beside(move: Move, keys: Any, values: Any, src: Any, dst: Any, *rest: Any) -> None:
    move(keys, values, src, dst, *rest)
    taken = torch.cat((src, dst))
    beside = next(slot for slot in range(len(keys[0])) if slot not in taken)
    keys[0][beside : beside + 8] += 1


WRONG: dict[str, Move] = {
    "unmoved": lambda *_: None,
    "unrotated": lambda move, k, v, src, dst, shifts, rope: move(k, v, src, dst, torch.zeros_like(shifts), rope),
    "other rows": lambda move, k, v, src, dst, shifts, rope: move(k, v, src.roll(1), dst, shifts, rope),
    "stale values": stale_values,
    "written beside": written_beside,
    "one too far": lambda move, k, v, src, dst, shifts, rope: move(k, v, src, dst, shifts + 1, rope),
}


@pytest.mark.parametrize("way", WRONG)
def test_wrong_rows_do_not(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Target("triton").active():
        move = splice.splice_rows
        monkeypatch.setattr(splice, "splice_rows", lambda *rows, **_: WRONG[way](move, *rows))
        with pytest.raises(BenchError, match=r"differ|changed|off by"):
            check_moves(GQA, torch.float32, 33, 5, torch.device("cpu"))


def test_another_kernel_than_the_fused_one_is_a_failure() -> None:
    with EAGER.active(), pytest.raises(BenchError, match="served by eager, not by the fused kernel"):
        check_moves(MLA, torch.bfloat16, 33, 5, torch.device("cpu"))
