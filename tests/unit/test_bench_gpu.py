"""The GPU benchmarks on a CPU: what is wrong is not timed; a machine with torch alone runs the day, and its records."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from pic_bench.environment import capture_environment
from pic_bench.gpu import day, kernel_pool, kernels, prefills
from pic_bench.gpu import record as gpu_record
from pic_bench.gpu.checks import judge
from pic_bench.gpu.clocks import open_counter
from pic_bench.gpu.defaults import gate_figures, waits
from pic_bench.gpu.model import MODELS, TORCH, AttentionBackend, Bench
from pic_bench.gpu.model_check import check_attention, check_model
from pic_bench.gpu.passes import SHIFT, Layout, gap_extend, make_lookup
from pic_bench.gpu.prefills import PrefillTiming, break_even, energy_request, run_gaps
from pic_bench.gpu.record import FIGURES, ITEMS, MARKS, Found, Record, Work, figure_table, file_name, read_records
from pic_bench.out_folder import write_json
from pic_bench.report.markdown import markdown_table

from sglang_pic.core import MOST_REUSE, CostModel
from sglang_pic.errors import BenchError, UnsupportedError

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

CPU = torch.device("cpu")
TINY = ("tiny-gqa-dims", "tiny-mla-dims")
DRY = Work(is_dry=True, folder=Path(), limit_s=2_000.0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no warm cache; `--backend` sets a variable."""
    monkeypatch.setattr(prefills, "_CHECK_TOKENS", 384)
    monkeypatch.setattr(kernels, "_POOL_BYTES", 1)
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "auto")


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
grouped, latent, expanded = (8, 2, 16, 16, 0, 0.25), (4, 1, 48, 32, 32, 0.2), (4, 4, 32, 16, 0, 0.2)
for shape in grouped, latent, expanded, (6, 2, 16, 16, 0, 0.25):
    try:
        print(check_attention(TRITON, AttentionShape(*shape, torch.float32), torch.device("cpu")))
    except UnsupportedError as error:
        print(error)
"""


@NEEDS_TRITON
def test_triton_attends_as_float32_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
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
SMALL = ["--model", "SmolLM2-135M", "--tokens", "16", "--repeats", "3"]


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


ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "bench" / "results" / "README.md"
BARE = [item.name for item in ITEMS if not item.servers]
# Imported before anything else in every Python process of the run: of all packages only these are installed.
BARE_MACHINE = """
import sys
from importlib.machinery import PathFinder

OURS = {"pic_kernels", "pic_traces", "sglang_pic", "msgspec", "xxhash", "fastcdc"}
TORCH = {"torch", "torchgen", "functorch", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "filelock"}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        is_refused = name.partition(".")[0] not in OURS | TORCH | {"triton", "numpy"} and "site-packages" in str(spec)
        return None if is_refused else spec

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""


@NEEDS_TRITON
def test_a_bare_machine_runs_all_that_needs_no_sglang(tmp_path: Path) -> None:
    """Every item, tiny, with the kernels interpreted; the same code paths as on the card."""
    (tmp_path / "sitecustomize.py").write_text(BARE_MACHINE)
    folders = [tmp_path, *(ROOT / name for name in (".", "kernels", "traces", "bench"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pic_bench.gpu", "--dry-run", "--out", str(out), "--commit", "c0ffee"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(out)
    assert {name: record.status for name, record in records.items()} == {
        item.name: "left out" if item.servers else "ok" for item in ITEMS
    }
    for name in BARE:
        record = records[name]
        assert record.is_dry
        assert record.environment.commit == "c0ffee"
        assert record.environment.compiled_loops is False, "numba is not among the packages"
        assert record.environment.command.endswith(f"--commit c0ffee --one {name}")
        # All but those that the sizes of a dry run leave out.
        missing = {figure.name for figure in FIGURES if figure.item == name} - set(record.found.figures)
        assert missing <= {"run_3000", "run_6000", "break_even"}, name
    moved = records["splice"].found
    assert len(moved.raw["errors"]) == 4 * 5 + 1
    assert 0 < moved.figures["move_error"] <= 1
    assert "MLA beyond 2^31 elements" in moved.raw["errors"]
    assert "open" in (out / "table.md").read_text()


def test_an_item_that_takes_too_long_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the next one runs."""
    arguments = ["--dry-run", "--item", "versions", "energy", "--limit-s", "0.2", "--out", str(tmp_path)]
    assert day.main(arguments) == 1
    records = read_records(tmp_path)
    assert {name: record.status for name, record in records.items()} == {"versions": "stopped", "energy": "stopped"}
    assert "stopped after 0 s" in records["versions"].found.failures[0]
    said = capsys.readouterr().out
    assert "energy: stopped" in said
    assert "2 items took" in said


def test_an_item_has_time_for_the_servers_that_it_starts(tmp_path: Path) -> None:
    """Compiled kernels make a start short; `warm` fills their caches, on a card and without a failure."""
    items, args = {item.name: item for item in ITEMS}, SimpleNamespace(out=tmp_path, limit_s=None)

    def limits() -> list[float]:
        return [day._limits_s(items[name], args)[0] for name in ("versions", "warm", "fa3", "defaults", "backends")]

    cold = [480, 480 + 900, 480 + 900, 480 + 3 * 900, 480 + 3 * 900]
    assert limits() == cold
    for status, is_dry in (("failed", False), ("ok", True), ("ok", False)):
        ran = {"item": "warm", "status": status, "is_dry": is_dry, "wall_s": 1.0}
        write_json(tmp_path / file_name("warm"), Record(**ran, environment=capture_environment(), found=Found()))
        is_warm = status == "ok" and not is_dry
        assert limits() == ([480, 480 + 900, 480 + 240, 480 + 3 * 240, 480 + 3 * 900] if is_warm else cold)
    args.limit_s = 7.0
    assert limits() == [7.0] * 5


def test_an_interrupted_day_keeps_its_records_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pic_bench.gpu", "--dry-run", "--item", "versions", "gaps", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "versions: ok" in line:
                break
        while not (tmp_path / "04-gaps.log").exists():
            time.sleep(0.05)
        (item,) = psutil.Process(running.pid).children()
        running.terminate()
        said = running.stdout.read()
    assert not item.is_running()
    assert {name: record.status for name, record in read_records(tmp_path).items()} == {"versions": "ok"}
    assert "2 items took" in said
    assert "| versions" in (tmp_path / "table.md").read_text()


def test_a_card_is_not_spent_without_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(day, "load_loops", lambda: False)
    assert day.main(["--item", "gaps", "--out", str(tmp_path / "out")]) == 2
    assert "pip install numba" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("SGLANG_PIC_LOOPS", "python")
    assert day._unable(SimpleNamespace(dry_run=False)) == "", "whoever asks for Python gets it"


def test_what_an_item_raises_is_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefills, "run_energy", lambda work: 1 / 0)
    assert day.main(["--one", "energy", "--dry-run", "--out", str(tmp_path)]) == 1
    record = read_records(tmp_path)["energy"]
    assert (record.status, record.found.failures) == ("failed", ["ZeroDivisionError: division by zero"])
    assert record.environment.compiled_loops is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert day.main(["--out", str(tmp_path / "out")]) == 2
    assert "torch finds no GPU; ARGS=--dry-run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_lists_every_figure_beside_its_command() -> None:
    """`make gpu ARGS=--page` writes it; figures without a record of a card are open."""
    page = PAGE.read_text("utf8")
    records = read_records(PAGE.parent / "gpu")
    assert gpu_record.render(page, records) == page, "run `make gpu ARGS=--page`"
    table = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    lines = {line.split("|")[1].strip(): line for line in table.splitlines() if "make gpu" in line}
    assert len(lines) == len(FIGURES)
    for figure in FIGURES:
        assert f"--item {figure.item}'" in lines[figure.what]
        assert figure.item in records or "open" in lines[figure.what]


def test_a_record_of_a_card_fills_its_figures_and_a_dry_run_none(tmp_path: Path) -> None:
    for is_dry in (True, False):
        found = Found(figures={"run_3000": 5.5, "run_6000": 9.0})
        ran = {"item": "runs", "status": "ok", "is_dry": is_dry, "wall_s": 1.0}
        record = Record(**ran, environment=capture_environment(), found=found)
        write_json(tmp_path / file_name("runs"), record)
        table = markdown_table(figure_table(read_records(tmp_path)))
        assert ("5.50 x, met" in table, "9.00 x, missed" in table) == (not is_dry, not is_dry)
    (tmp_path / file_name("gaps")).write_text("{}")
    with pytest.raises(BenchError, match=r"04-gaps.json: not a record"):
        read_records(tmp_path)


def test_a_splice_as_close_as_an_exact_hit_passes_and_nothing_else() -> None:
    right = {"spliced": 1e-4, "hit": 1e-4, "moved": 0.1, "wrong": 2.0}
    assert judge(right) == (pytest.approx(1e-4 / 1.2e-3), [])
    for change, words in (
        ({"spliced": 0.1}, "KL 0.1 at shift 0"),
        ({"spliced": 2e-3}, "KL 0.002 at shift 0"),
        ({"wrong": 1e-4}, "the comparison does not see them"),
        ({"spliced": 0.0, "hit": 0.0, "wrong": 0.0}, "the comparison does not see them"),
        ({"spliced": float("nan")}, "KL nan"),
    ):
        assert any(words in failure for failure in judge(right | change)[1])


def test_waits_are_places_as_torch_warns_of_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    warning = "UserWarning: called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)"
    places = [f"/site/{name}.py:7" for name in ("sglang_pic/adapter/serve/gap_batch", "sglang/srt/managers/x")]
    log.write_text("\n".join(f"{place}: {warning}\n  rows = x.tolist()" for place in (*places, places[0])))
    assert waits(log) == sorted(places)


def test_the_gate_is_read_from_what_the_server_shows() -> None:
    costs = msgspec.to_builtins(CostModel(computed_token_us=3.0, spliced_token_us=0.1, gap_us=40.0, floor_us=9.0))
    log = f"x\nsglang_pic: 3 delimiters, cost {msgspec.json.encode(costs).decode()}, config {{}}\n"
    assert gate_figures(log) == {"gate_computed_us": 3.0, "gate_gap_us": 40.0, "gate_floor_us": 9.0}
    assert gate_figures("sglang_pic: 3 delimiters, cost off, config {}") == {}


def test_joules_come_from_the_drivers_library_and_its_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library of three functions, the last of which gives millijoules or NVML's `not supported`."""
    statuses = [0, 0, 3]

    def count(_handle: object, millijoules: Any) -> int:
        millijoules._obj.value += 2_500
        return statuses.pop(0)

    nvml = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetTotalEnergyConsumption=count)
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid, _handle: 0 if uuid == b"GPU-3f2a" else 6
    monkeypatch.setattr("ctypes.CDLL", lambda name: nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="3f2a"))
    joules = open_counter(torch.device("cuda"))
    assert joules() == 5.0
    with pytest.raises(UnsupportedError, match="nvmlDeviceGetTotalEnergyConsumption gave NVML's error 3"):
        joules()
