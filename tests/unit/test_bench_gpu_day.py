"""`make gpu` on a CPU: a machine with nothing but torch runs what needs no SGLang; what it records and shows."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from pic_bench.environment import capture_environment
from pic_bench.gpu import day, prefills
from pic_bench.gpu.checks import gate_figures, judge, waits
from pic_bench.gpu.clocks import open_counter
from pic_bench.gpu.record import FIGURES, ITEMS, MARKS, Found, Record, figure_table, file_name, read_records, render
from pic_bench.out_folder import write_json
from pic_bench.report.markdown import markdown_table

from sglang_pic.core import CostModel
from sglang_pic.errors import BenchError, UnsupportedError

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "bench" / "results" / "README.md"
BARE = [item.name for item in ITEMS if not item.need]
# Imported before anything else in every Python process of the run: only these packages are installed.
BARE_MACHINE = """
import sys
from importlib.machinery import PathFinder

OURS = {"pic_kernels", "pic_native", "pic_traces", "sglang_pic"}
TORCH = {"torch", "torchgen", "functorch", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "filelock"}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        is_refused = name.partition(".")[0] not in OURS | TORCH | {"triton", "numpy"} and "site-packages" in str(spec)
        return None if is_refused else spec

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
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
        item.name: "left out" if item.need else "ok" for item in ITEMS
    }
    for name in BARE:
        record = records[name]
        assert record.is_dry
        assert record.stand_ins == ["msgspec", "xxhash", "fastcdc"]
        assert record.environment.commit == "c0ffee"
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
    assert "[2/2] energy" in capsys.readouterr().out


def test_what_an_item_raises_is_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefills, "run_energy", lambda work: 1 / 0)
    assert day.main(["--one", "energy", "--dry-run", "--out", str(tmp_path)]) == 1
    record = read_records(tmp_path)["energy"]
    assert (record.status, record.found.failures) == ("failed", ["ZeroDivisionError: division by zero"])
    assert record.stand_ins == [], "nothing is replaced where the packages are"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert day.main(["--out", str(tmp_path / "out")]) == 2
    assert "torch finds no GPU; ARGS=--dry-run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_lists_every_figure_beside_its_command() -> None:
    """`make gpu ARGS=--page` writes it; figures without a record of a card are open."""
    page = PAGE.read_text("utf8")
    records = read_records(PAGE.parent / "gpu")
    assert render(page, records) == page, "run `make gpu ARGS=--page`"
    table = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    lines = {line.split("|")[1].strip(): line for line in table.splitlines() if "make gpu" in line}
    assert len(lines) == len(FIGURES)
    for figure in FIGURES:
        assert f"--item {figure.item}'" in lines[figure.what]
        assert figure.item in records or "open" in lines[figure.what]


def test_a_record_of_a_card_fills_its_figures_and_a_dry_run_none(tmp_path: Path) -> None:
    for is_dry in (True, False):
        found = Found(figures={"run_3000": 5.5, "run_6000": 9.0})
        ran = {"item": "runs", "status": "ok", "is_dry": is_dry, "wall_s": 1.0, "stand_ins": []}
        record = Record(**ran, environment=capture_environment(), found=found)
        write_json(tmp_path / file_name("runs"), record)
        table = markdown_table(figure_table(read_records(tmp_path)))
        assert ("5.50 x, met" in table, "9.00 x, missed" in table) == (not is_dry, not is_dry)
    (tmp_path / file_name("gaps")).write_text("{}")
    with pytest.raises(BenchError, match=r"03-gaps.json: not a record"):
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
