"""Runs a comparison: every arm on a fresh server, which replays every trace, then the figures and the reports."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from pic_replay import ReplayOptions, run_replay
from pic_replay.records import load_records, load_summary
from pic_traces import load
from pic_traces.clock import split_clock
from pic_traces.source import limit, short_name

from pic_bench.compare.arms import Arm, arm_server
from pic_bench.compare.pairing import summarize_arm
from pic_bench.compare.report import write_all
from pic_bench.compare.run_folder import COMPARISON, Run, Scene, ScenesConfig, arm_folder
from pic_bench.compare.server import Server, pic_counters
from pic_bench.compare.summary import ArmSummary, Measured, Trace, model_facts
from pic_bench.environment import capture_environment, now
from pic_bench.out_folder import claim_folder, write_json
from sglang_pic.errors import BenchError

Replay = Callable[[ReplayOptions], Path]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare: the traces (scenes), all of them for one model, on every arm."""

    scenes: list[Scene]
    arms: list[Arm]
    out: Path
    force: bool = False
    start_timeout_s: float = 900.0
    quiet: bool = False


def run_compare(settings: Settings, *, replay: Replay = run_replay) -> list[Run]:
    """Run every arm, write the folder, and return what it says of every scene.

    Args:
        replay: replays the trace and writes the records.

    Raises:
        ConfigError: the folder cannot be used.
        TraceError: a trace cannot be read.
        BenchError: a server failed, or a replay ended early; the records so far stay in the folder.
        ReplayError: a replay could not start or crashed.
        OptionError: an option of the replay is not allowed.
    """
    # What cannot be replayed must not cost the start of a server.
    for scene in settings.scenes:
        for arm in settings.arms:
            _replay_options(settings, scene, arm, "http://127.0.0.1:1").check()
        wanted = scene.config
        limit(load(wanted.trace), num_sessions=wanted.limit_sessions, num_calls=wanted.limit_calls)
    claim_folder(settings.out, COMPARISON, force=settings.force)
    started_at = now()
    _write_configs(settings)
    arms: dict[str, dict[str, ArmSummary]] = {scene.name: {} for scene in settings.scenes}
    for arm in settings.arms:
        for scene, totals in zip(settings.scenes, _run_arm(settings, arm, replay), strict=True):
            arms[scene.name][arm.name] = totals
    for scene in settings.scenes:
        measured = Measured(
            trace=_trace(scene, settings.arms[0]),
            model=model_facts(scene.config.model),
            started_at=started_at,
            finished_at=now(),
            arms=arms[scene.name],
        )
        write_json(scene.folder / "summary.json", measured)
    return write_all(settings.out)


def _write_configs(settings: Settings) -> None:
    environment = capture_environment()
    if len(settings.scenes) > 1:
        write_json(settings.out / "config.json", ScenesConfig(scenes=[scene.name for scene in settings.scenes]))
        write_json(settings.out / "environment.json", environment)
    for scene in settings.scenes:
        scene.folder.mkdir(exist_ok=True)
        write_json(scene.folder / "config.json", scene.config)
        write_json(scene.folder / "environment.json", environment)


def _say(settings: Settings, arm: Arm, message: str) -> None:
    if not settings.quiet:
        number = settings.arms.index(arm) + 1
        print(f"[{number}/{len(settings.arms)}] {arm.name}: {message}", file=sys.stderr, flush=True)


def _run_arm(settings: Settings, arm: Arm, replay: Replay) -> list[ArmSummary]:
    """One server of the arm, which serves every scene; returns what it made of each."""
    model, log = settings.scenes[0].config.model, arm_folder(settings.out, arm.name) / "server.log"
    _say(settings, arm, "starting server ...")
    summaries: list[ArmSummary] = []
    counted: dict[str, float] = {}
    with arm_server(model, arm, log, start_timeout_s=settings.start_timeout_s) as server:
        state = f"server ready in {server.ready_after_s:.0f} s"
        for scene in settings.scenes:
            _say(settings, arm, f"{state}, replaying {scene.config.trace}")
            summary = _replay_scene(settings, scene, arm, server, replay, counted)
            summaries.append(summary)
            state = f"{summary.requests} requests, {summary.failed} failed, {summary.skipped} left out"
    _say(settings, arm, f"{state}; server stopped")
    return summaries


def _replay_scene(
    settings: Settings, scene: Scene, arm: Arm, server: Server, replay: Replay, counted: dict[str, float]
) -> ArmSummary:
    """Replay a scene into its arm's folder; `counted` are the server's counters, before and afterwards."""
    folder = arm_folder(scene.folder, arm.name)
    with server.watch():
        replay(_replay_options(settings, scene, arm, server.base_url))
    try:
        metrics = server.get("/metrics")
    except OSError as error:
        server.check_alive(grace_s=2.0)
        raise BenchError(f"{server.base_url}/metrics gave {error}. Log: {server.log_path}") from error
    server.check_alive()
    (folder / "metrics.txt").write_text(metrics, "utf8")
    replayed = load_summary(folder)
    if replayed.stopped is not None:
        raise BenchError(f"arm {arm.name!r}: the replay ended early: {replayed.stopped}. Records so far: {folder}.")
    counters = pic_counters(metrics)
    added = {key: value - counted.get(key, 0.0) for key, value in counters.items()}
    counted.update(counters)
    return summarize_arm(
        replayed,
        load_records(folder),
        kind=arm.kind,
        ready_s=server.ready_after_s,
        server_args=arm.server_args,
        pic_counters=added,
    )


def _replay_options(settings: Settings, scene: Scene, arm: Arm, base_url: str) -> ReplayOptions:
    asked = ("trace", "sessions", "limit_sessions", "limit_calls", "max_tokens")
    return ReplayOptions(
        **{name: getattr(scene.config, name) for name in asked},
        base_url=base_url,
        out=str(arm_folder(scene.folder, arm.name)),
        extra_body={} if scene.namespace is None else {"extra_key": scene.namespace},
        custom_params=arm.custom_params,
        logprobs=20,
        force=True,
        quiet=settings.quiet,
    )


def _trace(scene: Scene, arm: Arm) -> Trace:
    trace = scene.config.trace
    path = Path(split_clock(trace)[2]).expanduser()
    measured = [record for record in load_records(arm_folder(scene.folder, arm.name)) if not record.warmup]
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return Trace(
        name=short_name(trace) if digest else trace,
        path=trace if digest else None,
        sha256=digest,
        sessions=len({record.session_id for record in measured}),
        calls=len(measured),
    )
