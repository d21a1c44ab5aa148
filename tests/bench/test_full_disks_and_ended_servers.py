"""Disks that are full, files that cannot be read, servers that end: one line that says so, and an exit code."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from pic_bench.compare.arms import build_arms
from pic_bench.compare.compare import Settings, run_compare
from pic_bench.compare.run_folder import Config, make_scenes
from pic_replay import ReplayOptions, run_replay
from pic_replay.records import load_records, load_summary
from pic_traces import load
from pic_traces.data import DATA
from pic_traces.errors import ReplayError, TraceError

from sglang_pic.cli import main
from tests.helpers.files import files_up_to
from tests.helpers.replay_server import ENV, FakeServer, Handler, QuietServer, command, write_trace

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_under_stdout() -> None:
    script = "import sys; from sglang_pic.cli import main; sys.exit(main(['census', 'sample:opendevin', '--json']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("sglang-pic: error: No space left on device")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["explain", "sample:opendevin", "--out"], ["model", "tiny-gqa"]])
def test_a_full_disk_under_a_page_or_a_model_leaves_neither(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    with files_up_to(4_000):
        assert main([*words, str(tmp_path / "made")]) == 1
    assert "sglang-pic: error: " in capsys.readouterr().err.splitlines()[-1]
    assert [path for path in tmp_path.iterdir() if path.name != ".made.lock"] == []


def test_a_full_disk_under_a_replay(fake: FakeServer, tmp_path: Path) -> None:
    """Records beyond the disk's end are gone, and so is the log that would say why."""
    trace = write_trace(tmp_path / "t.jsonl", {"a": ["word " * 40] * 12})
    options = ReplayOptions(trace=trace, base_url=fake.url, out=str(tmp_path / "run"), warmup=0, quiet=True)
    fake.context_len = 100_000
    with files_up_to(4_096), pytest.raises(ReplayError, match=r"run: cannot be written: File too large"):
        run_replay(options)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_subfolder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests would be missing from every figure."""
    (tmp_path / "logs" / "closed").mkdir(parents=True)
    (tmp_path / "logs" / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    scan = os.scandir

    def refuse(folder: str | Path) -> object:
        # Root may read everything.
        if Path(folder).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(TraceError, match=r"closed: cannot be read: .*Permission denied"):
        list(load(tmp_path / "logs"))

    def refuse_all(_: Path, **__: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse_all)
    with pytest.raises(TraceError, match=r"'closed/a\.jsonl': cannot be read: .*Permission denied"):
        load("closed/a.jsonl")


def test_a_comparison_reads_its_whole_trace_before_a_server_starts(tmp_path: Path) -> None:
    """A gzip file that was cut off late."""
    whole, trace = (DATA / "opendevin_sample.jsonl.gz").read_bytes(), tmp_path / "cut.jsonl.gz"
    trace.write_bytes(whole[: len(whole) // 2])
    scenes = make_scenes([str(trace)], tmp_path / "run", Config(trace=str(trace), model="m", arms=["stock"]))
    arms = build_arms(["stock"], server_args=[], pic_config=None)
    with pytest.raises(TraceError, match="cannot be read: Compressed file ended"):
        run_compare(Settings(scenes=scenes, arms=arms, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def serve_until_killed(port: Connection, hanging: threading.Event) -> None:
    server = QuietServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": FakeServer(hanging=hanging)}))
    port.send(server.server_address[1])
    server.serve_forever()


def test_a_server_that_dies_ends_the_replay_and_says_so(tmp_path: Path) -> None:
    """It cuts off the call that it serves; what comes after finds nobody at the port."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    hanging = context.Event()
    server = context.Process(target=serve_until_killed, args=(there, hanging), daemon=True)
    server.start()
    url, out = f"http://127.0.0.1:{here.recv()}", tmp_path / "run"
    trace = write_trace(tmp_path / "t.jsonl", {"a": ["one", "HANG", *["more"] * 8]})
    argv = command(FakeServer(url=url), trace, out, "--warmup", "0", "--timeout-s", "30")
    with subprocess.Popen(argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert hanging.wait(60)
        server.kill()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "sglang-pic: stopped early: the server is gone: 3 connections in a row failed" in said
    assert "Traceback" not in said
    summary = load_summary(out)
    assert (summary.completed, summary.planned) == (1, 10)
    assert 1 + 3 <= summary.failed <= 1 + 4, "the call that was cut off, and those that found nobody"
    assert len(load_records(out)) == summary.requests == 1 + summary.failed
