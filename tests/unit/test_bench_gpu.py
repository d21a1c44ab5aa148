"""The prefill benchmark on a CPU with tiny dimensions: what it writes, and that it times nothing that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from pic_bench import gpu_prefill
from pic_bench.gpu import command
from pic_bench.gpu.clocks import Timing, measure_energy
from pic_bench.gpu.command import PrefillResult, break_even
from pic_bench.gpu.measure import Bench, PrefillTiming, check_attention, check_model
from pic_bench.gpu.model import TINY, TORCH, AttentionBackend, routed
from pic_bench.gpu.passes import SHIFT, gap_extend, make_lookup, plant, random_tokens, whole_extend

from sglang_pic.core import MOST_REUSE
from sglang_pic.errors import BenchError

CPU = torch.device("cpu")
SMALL = ["--prompt", "256", "--share", "0", "0.5", "0.99", "--runs", "2", "--length", "100", "--index-tokens", "500"]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny products are not worth waking threads for, least of all on a loaded machine."""
    monkeypatch.setattr(command, "_CHECK_TOKENS", 384)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")])
def test_writes_checks_times_and_what_is_left_out(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prefill.json"
    arguments = ["--model", *TINY, "--device", device, "--repeats", "3", "--energy-s", "0.2", "--out", str(out)]
    assert gpu_prefill.main([*SMALL, *arguments]) == 0
    result = msgspec.json.decode(out.read_bytes(), type=PrefillResult)
    assert [check.model for check in result.checks] == list(TINY)
    assert all(check.errors["wrong"] > 0.2 for check in result.checks)
    for model in TINY:
        gaps, runs = ([t for t in result.timings if (t.model, t.item) == (model, item)] for item in ("gaps", "runs"))
        assert [(t.runs, t.computed_tokens, t.spliced_tokens) for t in gaps] == [(0, 256, 0), (2, 128, 128)]
        assert all(len(t.ways["full"].samples_ms) == len(t.ways["gaps"].samples_ms) == 3 for t in gaps)
        (run,) = runs
        lengths = (run.repeated_tokens, run.prompt_tokens, run.computed_tokens, run.spliced_tokens)
        assert lengths == (100, 196, 97, 99)
        assert set(run.energy) == (set() if device == "cpu" else {"full", "gaps"})
    assert any("99% in 2 runs" in note for note in result.left_out)
    assert (result.idle_watts is None) == (device == "cpu")
    shown = capsys.readouterr().out
    assert f"| tiny-mla-dims {'torch' if device == 'cpu' else 'triton'} |" in shown
    assert "left out: tiny-gqa-dims, 256 tokens, 99% in 2 runs" in shown


def test_without_time_everything_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_prefill.main([*SMALL, "--model", "tiny-gqa-dims", "--device", "cpu", "--budget-s", "1"]) == 0
    shown = capsys.readouterr().out
    assert "left out: tiny-gqa-dims, 256 tokens: no time left" in shown
    assert "left out: tiny-gqa-dims, a run of 100: no time left" in shown


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that is lent, the first line must say what to bring."""
    monkeypatch.setattr(gpu_prefill, "find_spec", lambda name: None if name in ("torch", "numpy") else object())
    assert gpu_prefill.main([]) == 2
    shown = capsys.readouterr().err
    assert "not importable here: torch, numpy." in shown


@pytest.mark.parametrize("bad", [["--share", "1.0"], ["--runs", "0"], ["--energy-s", "-1"]])
def test_bad_settings_are_usage_errors(bad: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.run(bad)


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest) -> Bench:
    """A tiny model in float32 and its pool."""
    return Bench(request.param, TORCH, 3 * 512 + SHIFT, torch.float32, CPU)


def test_right_rows_pass_and_wrong_ones_do_not(tiny: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_model(tiny, 512).errors["gaps"] < 1e-5
    move, splicer = tiny.pool.splicer.splice, type(tiny.pool.splicer)
    # Rows one token off; rows not moved at all, which leaves NaN; keys of a moved run left unrotated.
    for broken in (
        lambda src, dst, shifts: move(src.roll(5), dst, shifts),
        lambda src, dst, shifts: None,
        lambda src, dst, shifts: move(src, dst, torch.zeros_like(shifts)),
    ):
        monkeypatch.setattr(splicer, "splice", lambda self, *slots, way=broken: way(*slots))
        with pytest.raises(BenchError, match="not timed"):
            check_model(tiny, 512)


def test_attention_that_sees_the_future_does_not_pass(tiny: Bench) -> None:
    def plan_ahead(extend, slots, shape):  # type: ignore[no-untyped-def]
        extend.seq_lens[:] = [length + 1 if length < len(extend.row) else length for length in extend.seq_lens]
        extend.prefix_lens[:] = [n + 1 for n in extend.prefix_lens[:-1]] + [400]
        return TORCH.plan(extend, slots, shape)

    for shape in tiny.model.shapes():
        check_attention(TORCH, shape, CPU)
        with pytest.raises(BenchError, match="nothing was timed"):
            check_attention(AttentionBackend("ahead", plan_ahead), shape, CPU)


def test_absorbed_and_expanded_attention_give_the_same() -> None:
    """A full prefill expands the latents; behind a prefix, here of one token, queries are absorbed."""
    bench = Bench("tiny-mla-dims", TORCH, 512, torch.float32, CPU)
    tokens, row = torch.arange(3, 203), bench.slots[:200]
    expanded, absorbed = (bench.model.forward(whole_extend(tokens, row, n), bench.pool, TORCH) for n in (0, 1))
    torch.testing.assert_close(absorbed, expanded, rtol=1e-4, atol=1e-4)


def test_grouped_experts_are_the_tokens_own() -> None:
    """Against every token through its own experts, one at a time."""
    random = torch.Generator().manual_seed(0)
    router, gate_up, down, hidden = (
        torch.randn(shape, generator=random) for shape in ((8, 16), (8, 64, 16), (8, 16, 32), (20, 16))
    )
    weights, chosen = (hidden @ router.T).softmax(-1).topk(2)
    expected = torch.zeros_like(hidden)
    for token in range(20):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    layer = {"router": router, "experts_gate_up": gate_up, "experts_down": down}
    torch.testing.assert_close(routed(hidden, layer, 2), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("share", "num_runs"), [(0.5, 1), (0.5, 8), (0.9, 8), (0.9, 1)])
def test_planted_runs_are_what_the_planner_could_plan(share: float, num_runs: int) -> None:
    config = MOST_REUSE
    donor = random_tokens(np.random.default_rng(0), 2_048 + SHIFT, 1_000)
    plan = plant(donor, 2_048, SHIFT, share, num_runs)
    assert plan is not None
    assert len(plan.runs) == num_runs
    assert len(plan.gaps) == num_runs + 1
    assert plan.num_spliced == int(2_048 * share) // num_runs * num_runs
    assert plan.gaps[0][1] > config.sink_tokens
    assert all(end > start for start, end in plan.gaps)
    for run in plan.runs:
        assert run.donor_end <= len(donor)
        assert np.array_equal(donor[SHIFT:][run.target_start : run.target_end], donor[run.donor_start : run.donor_end])
    tokens = torch.from_numpy(donor[SHIFT:].astype(np.int64))
    row, donor_row = torch.randperm(5_000)[: 2 * 2_048 + SHIFT].split((2_048, 2_048 + SHIFT))
    extend = gap_extend(tokens, row, plan, donor_row)
    assert extend.splice is not None
    assert torch.equal(torch.cat((extend.out_slots, extend.splice.dst)).sort().values, row.sort().values)
    assert torch.equal(extend.input_ids, tokens[extend.positions])
    assert set(extend.splice.shifts.tolist()) == {-SHIFT}


def test_what_the_planner_would_not_plan_is_not_planted() -> None:
    donor = random_tokens(np.random.default_rng(0), 2_048, 1_000)
    for share, num_runs in ((0.5, 32), (0.99, 1), (0.98, 26)):
        assert plant(donor, 2_048, 0, share, num_runs) is None
    assert plant(donor, 2_048, 0, 0.98, 1) is not None


@pytest.mark.parametrize("length", [16, 32, 48, 63, 100, 300])
def test_the_planner_finds_the_run(length: int) -> None:
    """A message of any length, in another prompt."""
    for seed in range(5):
        lookup = make_lookup(np.random.default_rng(seed), length, 1_000, 40_000 if not seed else 0)
        (run,) = lookup.plan().runs
        assert run.shift == -SHIFT
        assert run.num_tokens + run.seam_len == length


def test_energy_is_what_the_counter_gained() -> None:
    total = 100.0

    def work() -> None:
        nonlocal total
        total += 2.0

    energy = measure_energy(work, lambda: total, 0.02)
    assert energy.joules_each == pytest.approx(2.0)
    assert energy.seconds >= 0.02
    assert energy.watts == pytest.approx(2.0 * energy.repeats / energy.seconds)


def test_break_even_is_where_it_stays_faster() -> None:
    def timing(run_tokens: int, full: float, gaps: float) -> PrefillTiming:
        numbers = dict.fromkeys(("prompt_tokens", "repeated_tokens", "computed_tokens", "spliced_tokens"), run_tokens)
        ways = {"full": Timing(samples_ms=[full]), "gaps": Timing(samples_ms=[gaps])}
        return PrefillTiming(item="runs", model="m", backend="b", runs=1, ways=ways, **numbers)

    assert break_even([timing(300, 3, 2), timing(100, 3, 2), timing(200, 2, 3)]) == 300
    assert break_even([timing(100, 3, 2), timing(200, 3, 2)]) == 100
    assert break_even([timing(100, 2, 3)]) is None
