"""The GPU benchmarks on a CPU: what is wrong is not timed; a machine with torch alone runs the day, and its records."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from pic_bench.environment import capture_environment
from pic_bench.gpu import day, kernel_pool, kernels
from pic_bench.gpu import record as gpu_record
from pic_bench.gpu.checks import judge
from pic_bench.gpu.record import FIGURES, ITEMS, MARKS, Found, Record, figure_table, file_name, read_records
from pic_bench.out_folder import write_json
from pic_bench.report.markdown import markdown_table

from sglang_pic.errors import BenchError
from tests.conftest import ROOT

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no warm cache; `--backend` sets a variable."""
    monkeypatch.setattr(kernels, "_POOL_BYTES", 1)
    monkeypatch.setenv("SGLANG_PIC_KERNELS", "auto")


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


def test_wrong_rows_are_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(kernel_pool.Splicer, "splice", lambda *operands: None)
    assert kernels.main([*SMALL, "--slots", "run"]) == 1
    captured = capsys.readouterr()
    assert "nothing was timed" in captured.err
    assert captured.out == ""


PAGE = ROOT / "bench" / "results" / "GPU.md"
BARE = [item.name for item in ITEMS if not item.servers]
# Imported before anything else in every Python process of the run: of all packages only these are installed.
BARE_MACHINE = """
import sys
from importlib.machinery import PathFinder

OURS = {"pic_kernels", "pic_traces", "sglang_pic", "msgspec", "xxhash", "fastcdc", "click"}
TORCH = {"torch", "torchgen", "functorch", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "filelock"}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        is_refused = name.partition(".")[0] not in OURS | TORCH | {"triton", "numpy"} and "site-packages" in str(spec)
        return None if is_refused else spec

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.mark.slow
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
        assert {figure.name for figure in FIGURES if figure.item == name} == set(record.found.figures)
    moved = records["splice"].found
    assert len(moved.raw["errors"]) == 4 * 5 + 1
    assert 0 < moved.figures["move_error"] <= 1
    assert "MLA beyond 2^31 elements" in moved.raw["errors"]
    assert "open" in (out / "table.md").read_text()


def test_an_item_that_takes_too_long_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the next one runs."""
    arguments = ["--dry-run", "--item", "versions", "bandwidth", "--limit-s", "0.2", "--out", str(tmp_path)]
    assert day.main(arguments) == 1
    records = read_records(tmp_path)
    assert {name: record.status for name, record in records.items()} == {"versions": "stopped", "bandwidth": "stopped"}
    assert "stopped after 0 s" in records["versions"].found.failures[0]
    said = capsys.readouterr().out
    assert "bandwidth: stopped" in said
    assert "2 items took" in said


@pytest.mark.slow
def test_an_interrupted_day_keeps_its_records_and_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ["--dry-run", "--item", "versions", "splice", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "pic_bench.gpu", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "versions: ok" in line:
                break
        while not (tmp_path / "03-splice.log").exists():
            time.sleep(0.05)
        (item,) = psutil.Process(running.pid).children()
        running.terminate()
        said = running.stdout.read()
    assert not item.is_running()
    assert {name: record.status for name, record in read_records(tmp_path).items()} == {"versions": "ok"}
    assert "2 items took" in said
    assert "| versions" in (tmp_path / "table.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert day.main(["--out", str(tmp_path / "out")]) == 2
    assert "torch finds no GPU; ARGS=--dry-run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_lists_every_figure_beside_its_item() -> None:
    """`make gpu ARGS=--page` writes it; figures without a record of a card are open."""
    page = PAGE.read_text("utf8")
    records = read_records(PAGE.parent / "gpu")
    assert gpu_record.render(page, records) == page, "run `make gpu ARGS=--page`"
    table = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    lines = {line.split("`")[1]: line for line in table.strip().splitlines()}
    for figure in FIGURES:
        assert figure.what in lines[figure.item]
        assert figure.item in records or ": open" in lines[figure.item]


def test_a_record_of_a_card_fills_its_figures_and_a_dry_run_none(tmp_path: Path) -> None:
    for is_dry in (True, False):
        found = Found(figures={"gate_taken": 0.95, "replayed": 0.5})
        ran = {"item": "defaults", "status": "ok", "is_dry": is_dry, "wall_s": 1.0}
        record = Record(**ran, environment=capture_environment(), found=found)
        write_json(tmp_path / file_name("defaults"), record)
        table = markdown_table(figure_table(read_records(tmp_path)))
        assert ("95%, met" in table, "50%, missed" in table) == (not is_dry, not is_dry)
    (tmp_path / file_name("splice")).write_text("{}")
    with pytest.raises(BenchError, match=r"03-splice.json: not a record"):
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
