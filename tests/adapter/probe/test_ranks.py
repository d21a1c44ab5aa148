"""Ranks that read their files differently: all of them stop in the same words, and none waits for another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from sglang_pic.adapter.probe import ranks
from sglang_pic.adapter.probe.ranks import FaultGroup, agree_on_largest, agreed_time, check_alike
from tests.conftest import ROOT
from tests.helpers.processes import on_each_rank


def test_the_largest_of_every_rank(tmp_path: Path) -> None:
    def work(rank: int, group: Any) -> str:
        return str(agree_on_largest(torch.tensor([rank, -rank], dtype=torch.float64), group).tolist())

    assert on_each_rank(2, tmp_path / "store", work) == ["[1.0, 0.0]"] * 2


def test_ranks_whose_clocks_differ_have_one_time(tmp_path: Path) -> None:
    """By which pins end: ranks that release other rows would evict, and plan, differently."""

    def work(rank: int, group: Any) -> str:
        ranks.monotonic = lambda: 7.0 + rank  # type: ignore[assignment]
        return str(agreed_time(group))

    assert on_each_rank(2, tmp_path / "store", work) == ["8.0"] * 2


def test_a_rank_without_a_tokenizer_stops_the_self_test_before_any_pass(tmp_path: Path) -> None:
    """It would splice seeded ids where the others splice texts. Ranks that read alike go on."""
    from sglang_pic.adapter.startup.self_test import run_self_test
    from sglang_pic.config import PicConfig

    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((1, 1000), dtype=torch.int32)),
        model_config=SimpleNamespace(vocab_size=300),
    )
    splicer: Any = SimpleNamespace(view=None, geometry=SimpleNamespace(max_shift=1000))
    letters = SimpleNamespace(encode=lambda text, **_: list(text.encode()))

    def work(rank: int, group: Any) -> str:
        check_alike({"configurations": b"{}", "delimiters": b"[1,2]"}, group)
        tokenizer = letters if rank != 1 else None
        run_self_test(runner, splicer, PicConfig(), tokenizer=tokenizer, max_gaps=32, tp_group=group)
        return "on"

    (answer,) = {*on_each_rank(3, tmp_path / "store", work)}
    assert answer.startswith("UnsupportedError: tensor-parallel ranks [1] and rank 0 read different self-test prompts,")
    assert "--tokenizer-path" in answer


def test_a_rank_without_delimiters_stops_the_start(tmp_path: Path) -> None:
    """It would cut, and so donate, otherwise than the others."""
    from sglang_pic.adapter.startup import live_model
    from sglang_pic.config import PicConfig

    nothing = MagicMock()

    def work(rank: int, group: Any) -> str:
        # In a process of its own: nothing of this is put back. All that comes before and needs a live model.
        live_model.view_pool = live_model.read_geometry = live_model.Splicer = nothing
        live_model.read_drafts = lambda *_: []
        live_model.read_tokenizer = lambda _: (nothing, "") if rank == 0 else (None, "none")
        live_model.delimiters_of = lambda _: frozenset({1, 2})
        live_model.texts_of = lambda *_: ["a", "b"]
        live_model.read_live_model(MagicMock(tp_group=group), PicConfig(audit_rate=0))
        return "on"

    (answer,) = {*on_each_rank(2, tmp_path / "store", work)}
    assert answer.startswith("UnsupportedError: tensor-parallel ranks [1] and rank 0 read different delimiters,")


def test_ranks_with_the_same_fault_go_on_and_a_fault_of_one_rank_ends_it(tmp_path: Path) -> None:
    """A rank that alone computes what the others splice would wait for them for ever."""

    def work(rank: int, _: Any) -> str:
        group = FaultGroup(timeout_s=2.0)
        torch.distributed.barrier()  # However late a rank begins on a busy machine, both faults come together.
        group.check("fault_plan 1 ValueError")
        if rank == 1:
            return "serves on"
        group.check("fault_plan 2 ValueError")
        return "goes on alone"

    faulty, healthy = on_each_rank(2, tmp_path / "store", work)
    assert healthy == "serves on"
    assert faulty.startswith(
        "ContractError: tensor-parallel rank 0 had the fault 'fault_plan 2 ValueError' and another"
    )


def test_only_ranks_that_serve_the_same_requests_have_to_have_the_same_fault(tmp_path: Path) -> None:
    """With DP attention over four ranks, two by two."""

    def work(rank: int, _: Any) -> str:
        group = FaultGroup(2, timeout_s=20.0)
        if rank < 2:
            group.check("fault_plan 1 ValueError")
        return "on"

    assert on_each_rank(4, tmp_path / "store", work) == ["on"] * 4


STEPS = int(os.environ.get("SGLANG_PIC_RANK_STEPS", "3000"))
MET = ("plans with runs", "changed fields", "cost_gate", "donor_evicted", "aborts", "flushes", "evicted from the index")
"""Without which a run would show little."""


def test_ranks_plan_alike(tmp_path: Path) -> None:
    """Hash seeds, clocks, addresses, garbage collection and slot numbers are each rank's own."""
    # Collections would take a third of the time of the imports.
    imports = "import gc, sys; gc.disable(); from tests.helpers import rank_driver; gc.freeze(); gc.enable()"
    run = f"rank_driver.run(int(sys.argv[1]), 2, {str(tmp_path / 'store')!r}, {STEPS}, seed=18)"
    command = [sys.executable, "-c", f"{imports}; {run}"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(100 + rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=280 + STEPS // 20) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said[-2000:] for _, said in ended)
    counts: dict[str, int] = json.loads(ended[0][0].splitlines()[-1])
    print(counts)
    assert all(counts.get(name) for name in MET)
