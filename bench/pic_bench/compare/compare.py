"""Owns a comparison: every arm on a fresh server, one after the other, then the figures and the reports.

It must not parse command lines. What a server and a replay are comes from `server.py` and `pic_traces.replay`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from pic_traces import load
from pic_traces.clock import split_clock
from pic_traces.records import RequestRecord, load_records, load_summary
from pic_traces.replay import ReplayOptions, run_replay
from pic_traces.source import short_name

from pic_bench.compare.arms import Arm, ArmKind
from pic_bench.compare.counters import pic_counters
from pic_bench.compare.pairing import compare_arms, summarize_arm
from pic_bench.compare.run_folder import COMPARISON, Config, Run, arm_folder
from pic_bench.compare.server import Server, free_port, launch_command
from pic_bench.compare.summary import ArmSummary, Paired, Summary, Trace, write_json
from pic_bench.environment import capture_environment, model_facts, now
from pic_bench.out_folder import claim_folder
from pic_bench.report.report import write_reports
from sglang_pic.errors import BenchError

__all__ = ["Settings", "run_compare"]

LaunchCommand = Callable[[str, int, Sequence[str]], list[str]]
Replay = Callable[[ReplayOptions], Path]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare.

    Args:
        out: the run folder.
        replay: options of the replay; its address, folder and custom parameters are set for each arm.
        force: overwrite an earlier comparison in `out`.
        start_timeout_s: how long a server may take to become healthy.
        quiet: no progress on stderr.
    """

    config: Config
    arms: list[Arm]
    out: Path
    replay: ReplayOptions
    force: bool = False
    start_timeout_s: float = 900.0
    quiet: bool = False


class _ArmRun(NamedTuple):
    summary: ArmSummary
    records: list[RequestRecord]


def run_compare(settings: Settings, *, launch: LaunchCommand = launch_command, replay: Replay = run_replay) -> Run:
    """Run every arm and write the folder.

    Args:
        launch: the command line of a server, from model, port and flags.
        replay: replays the trace and writes the records; `pic_traces.replay.run_replay`.

    Raises:
        ConfigError: the folder cannot be used.
        TraceError: the trace cannot be read.
        BenchError: a server failed, or a replay ended early; the records so far stay in the folder.
        ReplayError: a replay could not start or crashed.
    """
    next(iter(load(settings.config.trace)), None)  # a trace that cannot be read must not cost the start of a server
    claim_folder(settings.out, COMPARISON, force=settings.force)
    started_at = now()
    write_json(settings.out / "config.json", settings.config)
    write_json(settings.out / "environment.json", capture_environment())
    runs: dict[str, _ArmRun] = {}
    for number, arm in enumerate(settings.arms, start=1):
        say = _Speaker(f"[{number}/{len(settings.arms)}] {arm.name}:", quiet=settings.quiet)
        runs[arm.name] = _run_arm(settings, arm, launch, replay, say)
    summary = _summarize(settings, runs, started_at)
    write_json(settings.out / "summary.json", summary)
    return write_reports(settings.out)


class _Speaker:
    """Progress on stderr: a waiting line that counts seconds on a terminal, plain lines elsewhere."""

    def __init__(self, prefix: str, *, quiet: bool) -> None:
        self._prefix = prefix
        self._quiet = quiet
        self._tty = sys.stderr.isatty()

    def line(self, message: str) -> None:
        """A whole line; on a terminal it replaces the waiting line."""
        if not self._quiet:
            start = "\r\x1b[K" if self._tty else ""
            print(f"{start}{self._prefix} {message}", file=sys.stderr, flush=True)

    def waiting(self, seconds: float) -> None:
        """How long the server has been starting; on a terminal only."""
        if self._tty and not self._quiet:
            print(f"\r\x1b[K{self._prefix} starting server ... {seconds:.0f} s", end="", file=sys.stderr, flush=True)


def _run_arm(settings: Settings, arm: Arm, launch: LaunchCommand, replay: Replay, say: _Speaker) -> _ArmRun:
    folder = arm_folder(settings.out, arm.name)
    port = free_port()
    server = Server(
        launch(settings.config.model, port, arm.server_args),
        port=port,
        log_path=folder / "server.log",
        env=arm.env,
        start_timeout_s=settings.start_timeout_s,
        progress=say.waiting,
    )
    say.line("starting server ...")
    with server:
        say.line(f"server ready in {server.ready_after_s:.0f} s, replaying {settings.config.trace}")
        options = msgspec.structs.replace(
            settings.replay,
            base_url=server.base_url,
            out=str(folder),
            custom_params={**settings.replay.custom_params, **(arm.custom_params or {})},
            force=True,
            quiet=settings.quiet,
        )
        with server.watch():
            replay(options)
        metrics = _metrics(server)
        server.check_alive()
    (folder / "metrics.txt").write_text(metrics, "utf8")
    replayed, records = load_summary(folder), load_records(folder)
    if replayed.stopped is not None:
        raise BenchError(f"arm {arm.name!r}: the replay ended early: {replayed.stopped}. Records so far: {folder}.")
    summary = summarize_arm(
        records,
        kind=arm.kind.value,
        wall_s=replayed.wall_s,
        ready_s=server.ready_after_s,
        server_args=arm.server_args,
        tools_flattened=replayed.tools_flattened,
        pic_counters=pic_counters(metrics),
    )
    say.line(f"{summary.requests} requests, {summary.failed} failed, {summary.skipped} left out; server stopped")
    return _ArmRun(summary, records)


def _metrics(server: Server) -> str:
    try:
        return server.get("/metrics")
    except OSError as error:
        server.check_alive(grace_s=2.0)
        raise BenchError(
            f"{server.base_url}/metrics gave {error}; the arm needs --enable-metrics. Log: {server.log_path}"
        ) from error


def _summarize(settings: Settings, runs: Mapping[str, _ArmRun], started_at: str) -> Summary:
    baseline = next((arm.name for arm in settings.arms if arm.is_stock), settings.arms[0].name)
    comparisons = [
        compare_arms(baseline, runs[baseline].records, arm.name, runs[arm.name].records)
        for arm in settings.arms
        if arm.name != baseline
    ]
    base_is_stock = next(arm for arm in settings.arms if arm.name == baseline).is_stock
    # Prefix hits alone change stock's answers: stock with none of them is the better floor of the two.
    floors = sorted((arm for arm in settings.arms if arm.is_stock and arm.name != baseline), key=_floor_order)
    floor = floors[0].name if floors else None
    first_pic = next((arm.name for arm in settings.arms if arm.kind is ArmKind.PIC), None)
    return Summary(
        trace=_trace(settings, runs[baseline].records),
        model=model_facts(settings.config.model),
        started_at=started_at,
        finished_at=now(),
        arms={name: run.summary for name, run in runs.items()},
        paired=_find(comparisons, first_pic) if base_is_stock else None,
        comparisons=comparisons,
        noise_floor=floor if base_is_stock else None,
    )


def _find(comparisons: Sequence[Paired], arm: str | None) -> Paired | None:
    return next((pair for pair in comparisons if pair.arm == arm), None)


def _trace(settings: Settings, records: Sequence[RequestRecord]) -> Trace:
    """The trace's name, its file's digest, and how much of it was replayed."""
    path = Path(split_clock(settings.config.trace)[2]).expanduser()
    measured = [record for record in records if not record.warmup]
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return Trace(
        name=short_name(settings.config.trace) if digest else settings.config.trace,
        path=settings.config.trace if digest else None,
        sha256=digest,
        sessions=len({record.session_id for record in measured}),
        calls=len(measured),
    )


def _floor_order(arm: Arm) -> bool:
    return arm.kind is not ArmKind.STOCK_COLD
