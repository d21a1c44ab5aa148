"""The prefill items on a CPU with tiny dimensions: the day's requests, and that nothing is timed that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pic_bench.gpu import prefills
from pic_bench.gpu.model import TORCH, AttentionBackend, Bench
from pic_bench.gpu.model_check import check_attention, check_model
from pic_bench.gpu.passes import SHIFT, Layout, gap_extend, make_lookup
from pic_bench.gpu.prefills import PrefillTiming, break_even, energy_request, run_gaps
from pic_bench.gpu.record import Work

from sglang_pic.core import MOST_REUSE
from sglang_pic.errors import BenchError

CPU = torch.device("cpu")
TINY = ("tiny-gqa-dims", "tiny-mla-dims")
DRY = Work(is_dry=True, folder=Path(), limit_s=2_000.0)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny products are not worth waking threads for, least of all on a loaded machine."""
    monkeypatch.setattr(prefills, "_CHECK_TOKENS", 384)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_what_fails_or_has_no_time_left_is_told_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    late = run_gaps(DRY._replace(limit_s=1.0))
    assert "tiny-gqa-dims, 512 tokens, 0 repeated: no time left" in late.notes

    def fail(bench: Bench, _tokens: int) -> dict[str, float]:
        if bench.name == TINY[0]:
            raise BenchError("rows are wrong; not timed.")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(prefills, "check_model", fail)
    found = run_gaps(DRY)
    told = ("BenchError: rows are wrong; not timed.", "RuntimeError: out of memory")
    assert found.failures == [f"{model}: {what}" for model, what in zip(TINY, told, strict=True)]
    assert found.figures == {}


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest) -> Bench:
    """A tiny model in float32 and its pool."""
    return Bench(request.param, TORCH, 4 * 512, torch.float32, CPU)


def test_right_rows_pass_and_wrong_ones_do_not(tiny: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_model(tiny, 512)["gaps"] < 1e-5
    move = tiny.pool.splice
    # Rows one token off; rows not moved at all, which leaves NaN; keys of a moved run left unrotated.
    for broken in (
        lambda src, dst, shifts: move(src.roll(5), dst, shifts),
        lambda src, dst, shifts: None,
        lambda src, dst, shifts: move(src, dst, torch.zeros_like(shifts)),
    ):
        monkeypatch.setattr(tiny.pool, "splice", broken)
        with pytest.raises(BenchError, match="not timed"):
            check_model(tiny, 512)


def test_attention_that_sees_the_future_does_not_pass(tiny: Bench) -> None:
    def plan_ahead(extend, slots, shape):  # type: ignore[no-untyped-def]
        extend.seq_lens[:] = [length + 1 if length < len(extend.row) else length for length in extend.seq_lens]
        extend.prefix_lens[:] = [n + 1 for n in extend.prefix_lens[:-1]] + [400]
        return TORCH.plan(extend, slots, shape)

    for shape in tiny.dims.attentions(torch.float32):
        check_attention(TORCH, shape, CPU)
        with pytest.raises(BenchError, match="nothing was timed"):
            check_attention(AttentionBackend("ahead", plan_ahead), shape, CPU)


LAYOUTS = [
    *(Layout(run=length) for length in (16, 32, 48, 63, 100, 300)),
    *(Layout.of_share(length, share, 8) for length in (2_048, 8_192, 32_768) for share in (0.5, 0.9, 0.99)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each.num_tokens}-{each.num_repeated}")
def test_the_planner_finds_every_run(layout: Layout) -> None:
    """At the sizes of the day; the pass writes every slot of the prompt once."""
    for seed in range(5):
        lookup = make_lookup(np.random.default_rng(seed), layout, 1_000, 40_000 if not seed else 0)
        plan = lookup.plan()
        assert plan.end == len(lookup.prompt) == layout.num_tokens
        assert (len(plan.runs), len(plan.gaps)) == (layout.runs, layout.runs + 1)
        first, *others = [run.num_tokens + run.seam_len for run in plan.runs]
        assert first == layout.run - max(0, MOST_REUSE.sink_tokens - layout.header)
        assert set(others) <= {layout.run}
        assert plan.runs[0].shift == -SHIFT
        for run in plan.runs:
            donor = lookup.donor[run.donor_start : run.donor_end]
            assert np.array_equal(lookup.prompt[run.target_start : run.target_end], donor)
    tokens = torch.from_numpy(lookup.prompt.astype(np.int64))
    row, donor_row = torch.randperm(len(tokens) + len(lookup.donor)).split((len(tokens), len(lookup.donor)))
    extend = gap_extend(tokens, row, plan, donor_row)
    assert extend.splice is not None
    assert torch.equal(torch.cat((extend.out_slots, extend.splice.dst)).sort().values, row.sort().values)
    assert torch.equal(extend.input_ids, tokens[extend.positions])


def test_what_the_planner_does_not_find_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_pic.core.ContentIndex.publish", lambda *_, **__: None)
    with pytest.raises(BenchError, match="the planner splices 0 tokens; not timed"):
        energy_request(DRY, "DeepSeek-V2-Lite")


def test_energy_is_of_a_prompt_with_95_percent_reused() -> None:
    plan = energy_request(DRY, "Llama-3.1-8B").plan
    assert plan.num_spliced / plan.end == pytest.approx(0.95, abs=0.01)


def test_break_even_is_where_it_stays_faster() -> None:
    def timing(run_tokens: int, full: float, gaps: float) -> PrefillTiming:
        numbers = dict.fromkeys(("prompt_tokens", "repeated_tokens", "spliced_tokens"), run_tokens)
        ways = {"full": [full], "gaps": [gaps]}
        return PrefillTiming(runs=1, ways=ways, **numbers)

    assert break_even([timing(300, 3, 2), timing(100, 3, 2), timing(200, 2, 3)]) == 300
    assert break_even([timing(100, 3, 2), timing(200, 3, 2)]) == 100
    assert break_even([timing(100, 2, 3)]) is None
