"""Comparisons: arithmetic on handwritten records, arms, folder and command line; a stand-in is the server."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
from pic_bench.compare import command
from pic_bench.compare.arms import build_arms, read_pic_config
from pic_bench.compare.compare import Settings, run_compare
from pic_bench.compare.pairing import compare_arms, pair_records, summarize_arm
from pic_bench.compare.run_folder import COMPARISON, Config, ScenesConfig, make_scenes
from pic_bench.compare.server import Server, free_port, pic_counters
from pic_bench.compare.summary import ArmKind, ArmSummary, Summary
from pic_bench.out_folder import claim_folder, write_json
from pic_bench.report.stats import merge_tokens, top_k_kl
from pic_replay import ReplayOptions
from pic_replay.records import RequestRecord, Status, summarize

from sglang_pic.arguments import Parser
from sglang_pic.errors import BenchError, ConfigError
from tests.helpers.replay_server import record, write_records


def test_warmup_and_other_prompts_are_no_pairs() -> None:
    base = [record(0, warmup=True), record(1), record(2)]
    arm = [record(0, warmup=True), record(1, prompt_key="another"), record(2)]
    assert [pair.base.call for pair in pair_records(base, arm)] == [2]
    assert compare_arms("stock", base, "pic", arm).prompts_differ == 1


def arm_of(records: list[RequestRecord]) -> ArmSummary:
    replayed = summarize(records, trace="t", model="m", planned=len(records))
    return summarize_arm(replayed, records, kind=ArmKind.PIC, ready_s=1.0, server_args=[], pic_counters={})


def test_arm_totals_count_answered_requests_only() -> None:
    records = [
        record(0),
        record(1, ttft_s=3.0, finished_at=4.0),
        record(2, status="failed", error="HTTP 500:\n boom"),
        record(3, status="skipped", reason="prompt of 9001 tokens + 16 output tokens > context of 8192"),
        record(4, status="skipped", reason="prompt of 9002 tokens + 16 output tokens > context of 8192"),
        record(0, warmup=True, ttft_s=99.0),
    ]
    arm = arm_of(records)
    assert (arm.requests, arm.failed, arm.skipped, arm.warmup_requests) == (3, 1, 2, 1)
    assert (arm.prompt_tokens, arm.prefix_hit_tokens, arm.computed_tokens) == (2000, 200, 1800)
    assert arm.ttft_s.p50 == 2.0
    assert arm.achieved_requests_per_s == 0.5
    assert arm.errors == {"HTTP 500: boom": 1}
    assert arm.skipped_reasons == {"prompt + 16 output tokens > context of 8192": 2}
    # A status that is not known there would silently leave requests out.
    arm = arm_of([record(number, status=status.value) for number, status in enumerate(Status)])
    assert arm.requests + arm.skipped == len(Status)


def test_kl_of_top_tokens() -> None:
    """One that the other list lacks has its smallest probability; parts of a character all decode to `\ufffd`."""
    kl = top_k_kl({"a": math.log(0.5), "x": math.log(0.5)}, {"a": math.log(0.5), "b": math.log(0.3)})
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.5) + 0.5 * math.log(0.5 / 0.3))
    merged = merge_tokens([("\ufffd", math.log(0.25)), ("a", math.log(0.5)), ("\ufffd", math.log(0.25))])
    assert merged == pytest.approx({"\ufffd": math.log(0.5), "a": math.log(0.5)})


def test_arms_differ_in_exactly_what_they_should() -> None:
    names, config = ["stock", "pic", "pic-off", "stock-again", "pic"], '{"max_gaps": 8}'
    arms = build_arms(names, server_args=["--page-size", "16"], pic_config=config)
    stock, pic, off, again, second = arms
    assert [arm.name for arm in arms] == [*names[:4], "pic-2"]
    assert pic.server_args == (*stock.server_args, "--radix-cache-backend", "pic")
    assert off.server_args == second.server_args == pic.server_args
    assert again.server_args == stock.server_args
    assert {"--enable-cache-report", "--enable-metrics", "--page-size"} <= set(stock.server_args)
    assert pic.env == {"SGLANG_PIC_CONFIG": config}
    assert off.custom_params == {"pic": {"mode": "off"}}
    assert pic.custom_params == {}
    (again,) = build_arms(["stock-again"], server_args=["--file-storage-path", "s/{arm}"], pic_config=None)
    assert again.server_args[-1] == "s/stock-again", "each arm has a store of its own"
    assert stock.env["SGLANG_PIC_CONFIG"] is None
    loaded = set(str(stock.env["SGLANG_PLUGINS"]).split(","))
    assert loaded.isdisjoint({"pic", "pic_probe"}), "stock must not load the cache's plugin, nor its probe"
    assert off.kind is ArmKind.PIC_OFF


def test_pic_config_is_checked_before_any_server_starts(tmp_path: Path) -> None:
    good = tmp_path / "pic.json"
    good.write_text('{"max_gaps": 4}', "utf8")
    assert read_pic_config(None) is None
    assert read_pic_config(str(good)) == str(good.resolve())
    for bad in ('{"max_gapz": 4}', "{", str(tmp_path / "absent.json")):
        with pytest.raises(ConfigError):
            read_pic_config(bad)


def test_counters_are_summed_over_ranks_and_keep_the_labels_that_matter() -> None:
    page = """# HELP sglang:pic_runs_total Runs.
sglang:pic_runs_total{model_name="m",tp_rank="0"} 3.0
sglang:pic_runs_total{model_name="m",tp_rank="1"} 3.0
sglang:pic_fallbacks_total{model_name="m",reason="no, \\"slots\\""} 2.0
sglang:pic_plan_seconds_bucket{le="0.1"} 9.0
sglang:pic_plan_seconds_sum 0.5
sglang:num_requests_total 7.0
sglang:spec_verify_calls_total{model_name="m"} 8.0
"""
    assert pic_counters(page) == {
        'sglang:pic_fallbacks_total{reason=no, "slots"}': 2.0,
        "sglang:pic_plan_seconds_sum": 0.5,
        "sglang:pic_runs_total": 6.0,
        "sglang:spec_verify_calls_total": 8.0,
    }


def test_only_an_earlier_comparison_is_overwritten_and_only_with_force(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    claim_folder(folder, COMPARISON, force=False)
    write_json(folder / "config.json", Config(trace="t", model="m", arms=["stock"]))
    (folder / "arms" / "stock").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine", "utf8")
    with pytest.raises(ConfigError, match="--force"):
        claim_folder(folder, COMPARISON, force=False)
    claim_folder(folder, COMPARISON, force=True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="holds no earlier comparison"):
        claim_folder(folder, COMPARISON, force=True)
    assert (folder / "notes.txt").exists()
    for name in ("run/clock", "other"):
        (tmp_path / name).mkdir(parents=True)
    write_json(folder / "config.json", ScenesConfig(scenes=["clock", "../other", "absent"]))
    claim_folder(folder, COMPARISON, force=True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"], "its scenes, and nothing else"
    assert (tmp_path / "other").is_dir()


def test_words_after_dashes_go_to_the_servers() -> None:
    parser = Parser()
    verb = parser.add_subparsers().add_parser("compare")
    command.add_arguments(verb)
    line = "compare t.jsonl u.jsonl --model m --server-arg=--tp-size=2 --out o -- --page-size 16 --out x"
    args = parser.parse_args(line.split())
    assert args.traces == ["t.jsonl", "u.jsonl"]
    assert args.server_args == ["--page-size", "16", "--out", "x"]
    assert args.server_arg == ["--tp-size=2"]
    assert args.out == Path("o")
    assert parser.parse_args(["compare", "t.jsonl", "--model", "m", "--out", "o"]).server_args == []


FAKE_SERVER = """
import http.server, os, signal, subprocess, sys, tempfile
port, behaviour = int(sys.argv[1]), sys.argv[2]
print("fake server", sys.argv[2:], flush=True)
print("file", tempfile.mkstemp()[1], flush=True)
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

TOP = {"config.json", "environment.json", "summary.json", "report.md", "report.html"}
PER_ARM = {"requests.jsonl", "summary.json", "metrics.txt"}


def stand_in(port: int, behaviour: str) -> list[str]:
    return [sys.executable, "-c", FAKE_SERVER, str(port), behaviour]


class Replay:
    """Leaves what a replay of four calls would; every server but stock's splices."""

    def __init__(self) -> None:
        self.asked: list[ReplayOptions] = []
        self.groups: list[int] = []
        """How many servers took turns in each replay."""

    def __call__(self, several: Sequence[ReplayOptions]) -> None:
        self.groups.append(len(several))
        for options in several:
            self._leave(options)

    def _leave(self, options: ReplayOptions) -> None:
        self.asked.append(options)
        folder, chunk_hit = Path(options.out), 0 if options.out.endswith("stock") else 600
        tokens = {"prefix_hit_tokens": 200, "chunk_hit_tokens": chunk_hit, "computed_tokens": 800 - chunk_hit}
        records = [record(call, **tokens) for call in range(4)]
        write_records(folder, records)
        summary = summarize(records, trace=options.trace, model="fake", planned=4)
        (folder / "summary.json").write_bytes(msgspec.json.encode(summary))


def make_server(folder: Path, behaviour: str = "serve") -> Server:
    port = free_port()
    return Server(stand_in(port, behaviour), port=port, log_path=folder / "server.log", start_timeout_s=60)


def children(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text("utf8").splitlines() if line.startswith("child")]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison starts stand-ins; stubborn ones ignore SIGTERM for good: no need to wait 20 s for that."""
    monkeypatch.setattr("pic_bench.compare.server.TERM_GRACE_S", 0.5)
    monkeypatch.setattr("pic_bench.compare.arms.launch_command", lambda _model, port, _args: stand_in(port, "alone"))


@pytest.mark.parametrize("behaviour", ["serve", "stubborn"])
def test_no_process_and_no_temporary_file_is_left_after_stop(tmp_path: Path, behaviour: str) -> None:
    """One child ignores SIGTERM, the other has left the process group as well."""
    with make_server(tmp_path, behaviour) as server:
        pid = server.pid
        family = children(server.log_path)
        assert len(family) == 2
        assert all(psutil.pid_exists(child) for child in family)
        (file,) = re.findall(r"^file (.*)$", server.log_path.read_text("utf8"), re.MULTILINE)
        assert Path(file).exists()
    assert not Path(file).parent.exists(), "all of a server's temporary files are in a folder of its own"
    assert not any(_alive(process) for process in (pid, *family))


def test_a_crash_at_start_gives_the_last_lines_and_the_path(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as caught, make_server(tmp_path, "crash-at-start"):
        pass
    message = str(caught.value)
    assert "exit status 3" in message
    assert str(tmp_path / "server.log") in message
    assert message.splitlines()[-30:] == [f"line {number}" for number in range(10, 40)]


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([sys.executable, "-c", "print('still loading', flush=True); import time; time.sleep(600)"], "--start-timeout"),
        (["no-such-program"], "no-such-program"),
    ],
)
def test_a_server_that_never_gets_healthy_is_given_up(words: list[str], said: str, tmp_path: Path) -> None:
    server = Server(words, port=free_port(), log_path=tmp_path / "server.log", start_timeout_s=1.0)
    with pytest.raises(BenchError, match=said), server:
        pass


def test_compare_runs_every_arm_and_leaves_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    replay = Replay()
    (run,) = run_compare(_settings(tmp_path / "run", ["stock", "pic", "pic-off"]), replay=replay)
    asked = replay.asked
    assert [options.custom_params for options in asked] == [{}, {}, {"pic": {"mode": "off"}}]
    assert all(options.extra_body == {} for options in asked)
    assert len({options.base_url for options in asked}) == 3
    assert run.summary.paired.computed_tokens_ratio == pytest.approx(0.25)
    assert run.summary.arms["pic"].pic_counters == {"sglang:pic_runs_total": 5.0}
    assert run.summary.noise_floor is None
    page = (tmp_path / "run" / "report.md").read_text()
    (titles,) = (line for line in page.splitlines() if line.startswith("| spliced tokens |"))
    assert titles.split(" | ")[2:] == ["computed tokens", "stock p50", "pic p50", "TTFT speedup |"]
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


def test_pairs_have_all_servers_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, traces = tmp_path / "run", ["clock:gen:random", "gen:random"]
    settings, replay = _settings(out, ["stock", "pic"], traces, pairs=True), Replay()
    runs = run_compare(settings, replay=replay)
    assert replay.groups == [2, 2], "both arms of each scene"
    assert [options.trace for options in replay.asked] == [traces[0], traces[0], traces[1], traces[1]]
    assert len({options.base_url for options in replay.asked}) == 2
    assert [run.summary.paired.computed_tokens_ratio for run in runs] == [pytest.approx(0.25)] * 2
    assert [run.summary.arms["pic"].pic_counters for run in runs] == [{"sglang:pic_runs_total": 5.0}] * 2
    assert "each call went to one after the other" in (out / "report.md").read_text()
    order = re.findall(r"\] (\w+: (?:starting|.*replaying clock|.*stopped))", capfd.readouterr().err)
    assert [line.split(":")[0] for line in order] == ["stock", "pic"] * 3


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _settings(
    out: Path, arms: list[str], traces: Sequence[str] = ("gen:random",), *, force: bool = False, pairs: bool = False
) -> Settings:
    scenes = make_scenes(traces, out, Config(trace=traces[0], model="fake-model", arms=arms, pairs=pairs))
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
