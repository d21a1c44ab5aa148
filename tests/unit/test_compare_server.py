"""A benchmark server is started, watched and stopped; a stand-in of forty lines takes SGLang's place."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
from pic_bench.compare.arms import build_arms
from pic_bench.compare.compare import Settings, run_compare
from pic_bench.compare.run_folder import Config, make_scenes
from pic_bench.compare.server import Server, free_port
from pic_bench.compare.summary import Summary
from pic_traces.records import summarize
from pic_traces.replay import ReplayOptions

from sglang_pic.errors import BenchError
from tests.unit.replay_records import record, write_records

FAKE_SERVER = """
import http.server, os, signal, subprocess, sys
port, behaviour = int(sys.argv[1]), sys.argv[2]
print("fake server", sys.argv[2:], flush=True)
if behaviour == "crash-at-start":
    for number in range(40):
        print("line", number, flush=True)
    sys.exit(3)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
for new_session in (False, True) if behaviour != "alone" else ():
    child = subprocess.Popen([sys.executable, "-c", sleep], stdout=subprocess.PIPE, start_new_session=new_session)
    child.stdout.readline()
    print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    runs = 0
    def do_GET(self):
        if self.path == "/crash":
            print("Traceback: out of slots", flush=True)
            os._exit(9)
        Handler.runs += 5 * (self.path == "/metrics")
        body = b"sglang:pic_runs_total %d.0\\n" % Handler.runs if self.path == "/metrics" else b""
        self.send_response(200 if self.path in ("/health", "/metrics") else 404)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


TOP = {"config.json", "environment.json", "summary.json", "report.md", "report.html", "report.svg"}
PER_ARM = {"requests.jsonl", "summary.json", "metrics.txt"}


def command(port: int, behaviour: str) -> list[str]:
    return [sys.executable, "-c", FAKE_SERVER, str(port), behaviour]


class Replay:
    """Leaves what a replay of four calls would; every server but stock's splices."""

    def __init__(self) -> None:
        self.asked: list[ReplayOptions] = []

    def __call__(self, options: ReplayOptions) -> Path:
        self.asked.append(options)
        folder, chunk_hit = Path(options.out), 0 if options.out.endswith("stock") else 600
        tokens = {"prefix_hit_tokens": 200, "chunk_hit_tokens": chunk_hit, "computed_tokens": 800 - chunk_hit}
        records = [record(call, **tokens) for call in range(4)]
        write_records(folder, records)
        summary = summarize(records, trace=options.trace, model="fake", planned=4)
        (folder / "summary.json").write_bytes(msgspec.json.encode(summary))
        return folder


def make_server(folder: Path, behaviour: str = "serve") -> Server:
    port = free_port()
    return Server(command(port, behaviour), port=port, log_path=folder / "server.log", start_timeout_s=60)


def children(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text("utf8").splitlines() if line.startswith("child")]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison starts stand-ins; stubborn ones ignore SIGTERM for good: no need to wait 20 s for that."""
    monkeypatch.setattr("pic_bench.compare.server.TERM_GRACE_S", 0.5)
    monkeypatch.setattr("pic_bench.compare.arms.launch_command", lambda _model, port, _args: command(port, "alone"))


def test_no_kernel_gives_a_servers_port_to_others_while_it_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert max(free_port() for _ in range(5)) + 233 < other.getsockname()[1]


@pytest.mark.parametrize("behaviour", ["serve", "stubborn"])
def test_no_process_is_left_after_stop(tmp_path: Path, behaviour: str) -> None:
    """One child ignores SIGTERM, the other has left the process group as well."""
    with make_server(tmp_path, behaviour) as server:
        pid = server.pid
        family = children(server.log_path)
        assert len(family) == 2
        assert all(psutil.pid_exists(child) for child in family)
    assert not any(_alive(process) for process in (pid, *family))


def test_a_crash_at_start_gives_the_last_lines_and_the_path(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as caught, make_server(tmp_path, "crash-at-start"):
        pass
    message = str(caught.value)
    assert "exit status 3" in message
    assert str(tmp_path / "server.log") in message
    assert message.splitlines()[-30:] == [f"line {number}" for number in range(10, 40)]


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no-such-program"):
        Server(["no-such-program"], port=1, log_path=tmp_path / "server.log").__enter__()


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_a_crash_during_the_run_interrupts_it_and_leaves_no_child(tmp_path: Path, handler: signal.Handlers) -> None:
    """The body hangs for ten minutes, as a client of a dead server may.

    A shell without job control starts what it puts into the background with SIGINT ignored. Once the server is gone
    its children belong to init: only what was noted before names them.
    """
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(BenchError, match="out of slots"), make_server(tmp_path) as server, server.watch():  # noqa: PT012
            family = children(server.log_path)
            _crash_later(server)
            threading.Event().wait(600)
        assert signal.getsignal(signal.SIGINT) is handler
        assert len(family) == 2
        assert not any(_alive(child) for child in family)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_the_user_stays_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), make_server(tmp_path) as server, server.watch():  # noqa: PT012
        pid = server.pid
        signal.raise_signal(signal.SIGINT)
    assert not _alive(pid)


def test_a_server_that_never_gets_healthy_is_given_up(tmp_path: Path) -> None:
    command_line = [sys.executable, "-c", "print('still loading', flush=True); import time; time.sleep(600)"]
    server = Server(command_line, port=free_port(), log_path=tmp_path / "server.log", start_timeout_s=1.0)
    with pytest.raises(BenchError, match="--start-timeout"), server:
        pass


def test_compare_runs_every_arm_and_leaves_the_folder_of_the_layout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    replay = Replay()
    (run,) = run_compare(_settings(tmp_path / "run", ["stock", "pic", "pic-off"]), replay=replay)
    asked = replay.asked
    assert [options.custom_params for options in asked] == [{}, {}, {"pic": {"mode": "off"}}]
    assert all(options.extra_body == {} for options in asked)
    assert len({options.base_url for options in asked}) == 3
    assert run.summary.paired is not None
    assert run.summary.paired.computed_tokens_ratio == pytest.approx(0.25)
    assert run.summary.arms["pic"].pic_counters == {"sglang:pic_runs_total": 5.0}
    assert run.summary.noise_floor is None
    assert _files(tmp_path / "run") == TOP | {
        f"arms/{arm}/{name}" for arm in run.summary.arms for name in (*PER_ARM, "server.log")
    }
    summary = msgspec.json.decode((tmp_path / "run" / "summary.json").read_bytes(), type=Summary)
    assert summary == run.summary
    assert summary.schema_version == 1
    assert "[2/3] pic: starting server" in capfd.readouterr().err


def test_scenes_share_an_arms_server_and_no_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, traces, names = tmp_path / "run", ["clock:gen:random", "gen:random"], ["clock-gen-random", "gen-random"]
    for _ in range(2):
        replay = Replay()
        runs = run_compare(_settings(out, ["stock", "pic"], traces, force=True), replay=replay)
    asked = replay.asked
    assert [options.trace for options in asked] == traces * 2
    assert [options.extra_body for options in asked] == [{"extra_key": name} for name in names] * 2
    assert [len({options.base_url for options in of_arm}) for of_arm in (asked[:2], asked[2:])] == [1, 1]
    # What the server counts is shared among the scenes: each has what was added during its replay.
    assert [run.summary.arms["pic"].pic_counters for run in runs] == [{"sglang:pic_runs_total": 5.0}] * 2
    assert [run.summary.trace.name for run in runs] == traces
    files = TOP | {f"arms/{arm}/{name}" for arm in ("stock", "pic") for name in PER_ARM}
    logs = {f"arms/{arm}/server.log" for arm in ("stock", "pic")}
    assert _files(out) == TOP | logs | {f"{scene}/{file}" for scene in names for file in files}
    told = capfd.readouterr().err
    assert "s, replaying clock:gen:random" in told
    assert "[2/2] pic: 4 requests, 0 failed, 0 left out, replaying gen:random" in told


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _settings(out: Path, arms: list[str], traces: Sequence[str] = ("gen:random",), *, force: bool = False) -> Settings:
    scenes = make_scenes(traces, out, Config(trace=traces[0], model="fake-model", arms=arms))
    return Settings(scenes=scenes, arms=build_arms(arms, server_args=[], pic_config=None), out=out, force=force)


def _crash_later(server: Server) -> None:
    def crash() -> None:
        with pytest.raises((OSError, ConnectionError)):
            server.get("/crash")

    threading.Thread(target=crash, daemon=True).start()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.Error):
        return False
