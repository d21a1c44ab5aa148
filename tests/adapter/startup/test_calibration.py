"""The cost gate on machines whose cost is known: what it learns from the passes it times, and what it then takes."""

from __future__ import annotations

import logging
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pic.adapter.startup.calibration import calibrate
from sglang_pic.adapter.startup.costs import report
from sglang_pic.core import CostModel, num_reads
from sglang_pic.runtime.views import PoolKind
from tests.helpers.builders import BareRunner, make_path

pytestmark = pytest.mark.usefixtures("no_groups")


class Machine(BareRunner):
    """A runner and a splicer whose work only moves a clock on, in microseconds."""

    def __init__(self, *, floor: float, token: float, noise: float = 0.0, **costs: float) -> None:
        super().__init__(32_768)
        self.floor, self.token = floor, token
        self.gap_token = costs.get("gap_token", token)
        names = "gap_floor", "gap", "splice", "reread", "far", "gap_far"
        self.gap_floor, self.gap, self.launch, self.reread, self.far, self.gap_far = (
            costs.get(name, 0.0) for name in names
        )
        self._noise, self._random, self.now_us = noise, random.Random(0), 0.0
        self.contexts: list[int] = []
        self.extends: set[tuple[int, int]] = set()
        self.num_keys: list[int] = []
        self.passes: list[tuple[int, int, bool]] = []
        self.geometry = SimpleNamespace(max_shift=8_192)
        self.view = SimpleNamespace(
            **{
                "kind": PoolKind.MLA if self.gap_far else PoolKind.MHA,
                "page_size": 1,
                "num_slots": 65_536,
                "windows": None,
            },
            device=torch.device("cpu"),
            fill=lambda *_: None,
        )
        self.token_to_kv_pool_allocator = SimpleNamespace(size=65_535)
        self.path = make_path(self)  # type: ignore[arg-type]

    def forward(self, batch: Any) -> Any:
        """SGLang's, with our hook around it."""
        return self.path._forward(lambda _runner, inner: self._compute(inner), self, batch)

    def _compute(self, batch: Any) -> None:
        spliced = self.path._running is not None
        self.contexts.extend(batch.extend_prefix_lens_cpu)
        self.num_keys.append(batch.batch_size * max(batch.seq_lens_cpu.tolist()))
        num_tokens = int(batch.extend_num_tokens)
        assert num_tokens == len(batch.input_ids) == sum(batch.extend_seq_lens_cpu)
        self.passes.append((num_tokens, batch.batch_size, spliced))
        floor = max(self.floor, self.gap_floor) if spliced else self.floor
        again = self.reread * (int(batch.seq_lens_cpu.sum()) - num_tokens)
        token, far = (self.gap_token, self.gap_far) if spliced else (self.token, self.far)
        extends = [*zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True)]
        self.extends.update(extends)
        work = token * num_tokens + far * sum(num * before for num, before in extends)
        self._spend(max(floor, work) + self.gap * (batch.batch_size - 1) + again)

    def splice(self, src: torch.Tensor, dst: torch.Tensor, shifts: torch.Tensor, _: None = None) -> None:
        """A copy at 100 rows a microsecond."""
        assert len(src) == len(dst) == len(shifts)
        self._spend(self.launch + 0.01 * len(src))

    def _spend(self, us: float) -> None:
        self.now_us += us * (1 + self._noise * self._random.expovariate(1.0))

    def learn(self, *, max_sequences: int = 1_000, max_tokens: int = 8_192, max_keys: int = 1 << 24) -> CostModel:
        return calibrate(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            max_sequences=max_sequences,
            max_keys=max_keys,
            max_tokens=max_tokens,
            tp_group=None,
            clock=lambda: self.now_us / 1e6,
        )

    def saved_us(self, prompt_len: int, run_len: int) -> float:
        """What a run saves in truth, in the middle of a prompt that is served alone."""
        rest = max(self.floor, self.gap_floor, self.token * (prompt_len - run_len))
        whole = max(self.floor, self.token * prompt_len)
        return whole - rest - self.gap - self.launch - 0.01 * run_len


def learnt_us(cost: CostModel, prompt_len: int, run_len: int) -> float:
    return cost.request_saves([(run_len, prompt_len), (prompt_len, prompt_len)], [(0, run_len)])


MACHINES = {
    # About SmolLM2, Llama-3.2-1B, Llama-3.1-8B on one H100; 70B on four; a CPU.
    "launches": {"floor": 4_000.0, "token": 0.8, "gap_floor": 6_000.0},
    "launches and arithmetic": {"floor": 2_500.0, "token": 4.0, "gap_floor": 4_000.0},
    "arithmetic": {"floor": 6_000.0, "token": 32.0, "gap_floor": 8_000.0},
    "weights": {"floor": 14_000.0, "token": 75.0, "gap_floor": 14_000.0},
    "no floor": {"floor": 0.0, "token": 1_000.0},
}
OVERHEAD = {"gap": 30.0, "splice": 200.0}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_run_is_taken_where_it_saves(name: str, noise: float) -> None:
    """Also where few tokens take as long as hundreds, which hides what computing costs from short passes."""
    machine = Machine(**MACHINES[name], **OVERHEAD, noise=noise)
    cost = machine.learn()
    wrong = {}
    for prompt_len in (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768):
        for run_len in (64, 128, 256, 1_000, 4_000, 16_000):
            # What saves or costs less than a tenth of a pass may go either way.
            saved = machine.saved_us(prompt_len, run_len)
            clear = abs(saved) > 0.1 * max(machine.floor, machine.token * prompt_len)
            if run_len < prompt_len and clear and (learnt_us(cost, prompt_len, run_len) > 0) != (saved > 0):
                wrong[prompt_len, run_len] = saved
    assert not wrong
    assert cost.shortest_run(32_768) is not None


def test_what_a_splice_costs_is_timed_on_the_way_of_gap_batches() -> None:
    """Which may be slower than that of other prefills: a captured graph may not take them."""
    machine = Machine(floor=2_000.0, token=5.0, gap_floor=7_000.0, gap=50.0, splice=300.0)
    cost = machine.learn()
    assert {spliced for _, _, spliced in machine.passes} == {False, True}
    assert {(n, sequences) for n, sequences, spliced in machine.passes if spliced} == {(16, 1), (16, 16), (8_192, 1)}
    assert cost.computed_token_us == pytest.approx(5.0)
    assert cost.gap_us == pytest.approx(50.0)
    assert cost.request_us == pytest.approx(300.0, rel=0.01)
    assert cost.floor_us == pytest.approx(2_000.0, rel=0.05)
    assert cost.gap_floor_us == pytest.approx(7_000.0, rel=0.02)
    assert cost.spliced_token_us == pytest.approx(0.01)


@pytest.mark.parametrize(("max_keys", "longest"), [(1 << 24, 32_632), (1 << 16, 3_960), (1 << 14, 0)])
def test_a_gap_is_charged_for_what_it_reads_again(max_keys: int, longest: int) -> None:
    """About Llama-3.1-8B on one H100: 4 ms for 100,000 tokens. A short run saves less than that, and does near 0."""
    machine = Machine(floor=6_000.0, token=32.0, gap=30.0, splice=200.0, reread=0.04)
    cost = machine.learn(max_keys=max_keys)
    assert longest <= max(machine.contexts) < longest + 136
    assert (max(machine.num_keys) == max_keys) == (max_keys == 1 << 16), "the bound is timed, where the row is so long"
    assert cost.gap_us == pytest.approx(30.0, rel=0.1)
    assert cost.gap_context_us == pytest.approx(0.04 if longest else 0.0, rel=0.01)
    assert cost.saves(100, 1_000) > 0, "3.2 ms computed"
    assert (cost.saves(100, 100_000) > 0) == (not longest)


@pytest.mark.parametrize("gap_far", [0.006, 0.002, 0.0])
def test_what_a_token_reads_at_more_cost_beside_a_splice_is_charged_by_context(gap_far: float) -> None:
    """MLA: after 64,000 tokens the absorbed query takes as long as 2.5 to 3 tokens of SGLang's own eager prefill."""
    machine = Machine(floor=6_000.0, token=32.0, far=0.002, gap_far=gap_far, noise=0.001, **OVERHEAD)
    cost = machine.learn()
    absorbs = gap_far > machine.far
    learnt = (0.002, 0.006) if absorbs else (0.0, 0.0)
    assert (cost.token_context_us, cost.gap_token_context_us) == pytest.approx(learnt, rel=0.05)
    far = {num_tokens for num_tokens, before in machine.extends if before >= 8_192}
    assert (1_024 in far) == bool(gap_far), "timed with MLA alone"
    assert not gap_far or (1_024, 31_735) in machine.extends, "as far as the pool goes"
    taken = {}
    for prefix_len in (0, 2_000, 64_000):
        for run_len in (1_000, 2_000, 3_000):
            end = prefix_len + 4_000
            gap, run = (prefix_len, end - run_len), (end - run_len, end)
            saved_us = partial(cost.request_saves, [gap, (end, end)], [run])
            taken[prefix_len, run_len] = saved_us() > 0
            other_us = saved_us(num_before=4_000, reads_before=num_reads([(64_000, 68_000)]))
            assert (other_us > 0) == (not absorbs), "1 s more for the other"
    assert {case for case, is_taken in taken.items() if not is_taken} == (
        {(64_000, 1_000), (64_000, 2_000)} if absorbs else set()
    ), "computed tokens take 2.6 times as long there"


def test_a_slope_within_noise_is_not_trusted_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """Computing is not free: a long prompt takes as many passes as hold its tokens."""
    machine = Machine(floor=4_000.0, token=0.0, **OVERHEAD, noise=0.01)
    with caplog.at_level(logging.WARNING):
        cost = machine.learn()
    (record,) = caplog.records
    assert "within noise: 4096 tokens take 4" in record.getMessage()
    assert "8192 take 4" in record.getMessage()
    assert cost.computed_token_us == pytest.approx(4_000 / 8_192, rel=0.05)
    assert learnt_us(cost, 32_768, 16_384) > 0, "two passes of four"
    caplog.clear()
    Machine(floor=6_000.0, token=32.0, **OVERHEAD, noise=0.02).learn()
    assert caplog.records == [], "a clear slope"


@pytest.mark.parametrize("context_len", [8_192, 32_768])
def test_a_gate_that_takes_nothing_says_so_and_another_what_it_takes(
    context_len: int, caplog: pytest.LogCaptureFixture
) -> None:
    cost = CostModel(computed_token_us=0.5, spliced_token_us=0.1, gap_us=0.0, request_us=900.0, floor_us=4_000.0)
    with caplog.at_level(logging.INFO):
        report(cost, context_len=context_len)
    (record,) = caplog.records
    takes_nothing = context_len == 8_192
    assert record.levelno == (logging.WARNING if takes_nothing else logging.INFO)
    said = ["shortest run worth splicing alone"]
    if takes_nothing:
        said = ["will reject every run, up to the context's 8192 tokens", 'cost_gate to "off"']
        said += ["a computed token takes 0.5 us", "the shortest pass 4000"]
    assert [part for part in said if part not in record.getMessage()] == []
