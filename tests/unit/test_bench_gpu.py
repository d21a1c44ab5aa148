"""Prefills, attention and kernels of the GPU benchmarks, tiny and on a CPU: nothing is timed that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from pic_bench.gpu import kernel_pool, kernels, prefills
from pic_bench.gpu.model import MODELS, TORCH, AttentionBackend, Bench
from pic_bench.gpu.model_check import check_attention, check_model
from pic_bench.gpu.passes import SHIFT, Layout, gap_extend, make_lookup
from pic_bench.gpu.prefills import PrefillTiming, break_even, energy_request, run_gaps
from pic_bench.gpu.record import Work

from sglang_pic.core import MOST_REUSE
from sglang_pic.errors import BenchError

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

CPU = torch.device("cpu")
TINY = ("tiny-gqa-dims", "tiny-mla-dims")
DRY = Work(is_dry=True, folder=Path(), limit_s=2_000.0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny products are not worth waking threads for; there is no warm cache; `--backend` sets a variable."""
    monkeypatch.setattr(prefills, "_CHECK_TOKENS", 384)
    monkeypatch.setattr(kernels, "_POOL_BYTES", 1)
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "auto")
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
    def plan_ahead(extend, slots, shape):
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


# A process of its own: Triton reads the variable when it is imported, for its own library too.
INTERPRETED = """
import torch
from pic_bench.gpu.model import AttentionShape
from pic_bench.gpu.attention_triton import TRITON
from pic_bench.gpu.model_check import check_attention
from sglang_pic.errors import UnsupportedError
torch.set_num_threads(1)
grouped, latent, expanded = (8, 2, 16, 16, 0, 0.25), (4, 1, 48, 32, 32, 0.2), (4, 4, 32, 16, 0, 0.2)
for shape in grouped, latent, expanded, (6, 2, 16, 16, 0, 0.25):
    try:
        print(check_attention(TRITON, AttentionShape(*shape, torch.float32), torch.device("cpu")))
    except UnsupportedError as error:
        print(error)
"""


@NEEDS_TRITON
def test_triton_attends_as_float32_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    *errors, refusal = done.stdout.splitlines()
    assert len(errors) == 3
    assert all(float(error) < 1e-6 for error in errors)
    assert "must be powers of two" in refusal


@NEEDS_TRITON
@pytest.mark.parametrize("block", [1, 4, 32])
def test_tiles_cover_every_query_once(block: int) -> None:
    from pic_bench.gpu.attention_triton import tile_queries

    tiles = tile_queries([0, 40, 64], [33, 41, 214], block)
    covered = [(first + i, position + i) for first, count, position in tiles.tolist() for i in range(count)]
    positions = [*range(33), 40, *range(64, 214)]
    assert sorted(covered) == list(enumerate(positions))
    assert np.all(tiles[:, 1] <= block)
    assert np.all(np.diff(tiles[:, 2]) <= 0)


@NEEDS_TRITON
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "DeepSeek-V2-Lite"])
def test_it_compiles_for_hopper_within_its_shared_memory(model: str) -> None:
    """A Hopper program may have 227 KiB."""
    from pic_bench.gpu.attention_triton import compile_for
    from triton.backends.compiler import GPUTarget

    for shape in MODELS[model].attentions(torch.bfloat16):
        compiled = compile_for(shape, GPUTarget("cuda", 90, 32))
        assert 0 < compiled.metadata.shared <= 227 * 1024


Capture = pytest.CaptureFixture[str]
SMALL = ["--model", "rows of 128 B", "--tokens", "16", "--repeats", "3"]


@pytest.mark.parametrize("model", ["SmolLM2-135M", "DeepSeek-V2-Lite"])
def test_every_way_moves_the_same_rows(model: str) -> None:
    """The baselines would prove nothing if they did less."""
    shape = kernel_pool.SHAPES[model]
    results = []
    for name in ("move", "move_then_rope"):
        pool = kernel_pool.Pool(shape, 2, 160, torch.device("cpu"))
        pool.fill()
        torch.manual_seed(5)
        window = kernel_pool.make_window(pool, "scattered", 32, 16)
        getattr(pool, name)(window)
        results.append(pool.memory.float())
    torch.testing.assert_close(*results, rtol=2**-7, atol=1e-3)


def test_layers_are_left_out_to_fit(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_free_bytes", lambda device: 3 << 20)
    out = tmp_path / "kernels.json"
    arguments = ["--model", "DeepSeek-V3", "--tokens", "16", "--repeats", "1", "--slots", "run", "--out", str(out)]
    assert kernels.main(arguments) == 0
    (timing,) = msgspec.json.decode(out.read_bytes(), type=kernels.KernelResult).timings
    assert (timing.layers, timing.layers_of_model) == (14, 61)
    assert " 14/61 |" in capsys.readouterr().out


def test_wrong_rows_are_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(kernel_pool.Splicer, "splice", lambda *operands: None)
    assert kernels.main([*SMALL, "--slots", "run"]) == 1
    captured = capsys.readouterr()
    assert "nothing was timed" in captured.err
    assert captured.out == ""
