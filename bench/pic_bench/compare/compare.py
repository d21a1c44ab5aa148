"""Runs a comparison: every arm on a fresh server, which replays every trace, then the figures and the reports.

The servers run one after the other, or with `--pairs` at once: then each call goes to one after the other.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from pic_replay import ReplayOptions, run_replays
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
from sglang_pic.output import write_whole

Replay = Callable[[Sequence[ReplayOptions]], object]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The traces (scenes) to compare, all for one model, on every arm."""

    scenes: list[Scene]
    arms: list[Arm]
    out: Path
    force: bool = False
    start_timeout_s: float = 900.0
    quiet: bool = False


def run_compare(settings: Settings, *, replay: Replay = run_replays) -> list[Run]:
    """Run every arm, write the folder, and return its summary of every scene.

    Args:
        replay: replays a trace on servers that take turns, and writes the records of each.

    Raises:
        ConfigError: the folder cannot be used.
        TraceError: a trace cannot be read.
        BenchError: a server failed, or a replay ended early; the records so far stay in the folder.
        ReplayError: a replay could not start or crashed.
        OptionError: an option of the replay is not allowed.
    """
    # A trace that cannot be replayed must not cost the start of a server.
    for scene in settings.scenes:
        for arm in settings.arms:
            _replay_options(settings, scene, arm, "http://127.0.0.1:1").check()
        wanted = scene.config
        limit(load(wanted.trace), num_sessions=wanted.limit_sessions, num_calls=wanted.limit_calls)
    claim_folder(settings.out, COMPARISON, force=settings.force)
    started_at = now()
    _write_configs(settings)
    arms: dict[str, dict[str, ArmSummary]] = {scene.name: {} for scene in settings.scenes}
    at_once = [settings.arms] if settings.scenes[0].config.pairs else [[arm] for arm in settings.arms]
    for together in at_once:
        for scene, totals in zip(settings.scenes, _run_arms(settings, together, replay), strict=True):
            arms[scene.name] |= totals
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


def _run_arms(settings: Settings, arms: Sequence[Arm], replay: Replay) -> list[dict[str, ArmSummary]]:
    """A server for each arm, which all run at once and serve every scene; returns each arm's result of each scene."""
    scenes = list[dict[str, ArmSummary]]()
    with ExitStack() as stack:
        servers, states = dict[str, Server](), dict[str, str]()
        for arm in arms:
            log = arm_folder(settings.out, arm.name) / "server.log"
            _say(settings, arm, "starting server ...")
            server = arm_server(settings.scenes[0].config.model, arm, log, start_timeout_s=settings.start_timeout_s)
            servers[arm.name] = stack.enter_context(server)
            states[arm.name] = f"server ready in {server.ready_after_s:.0f} s"
        counted = {arm.name: dict[str, float]() for arm in arms}
        for scene in settings.scenes:
            for arm in arms:
                _say(settings, arm, f"{states[arm.name]}, replaying {scene.config.trace}")
            _replay_scene(settings, scene, arms, servers, replay)
            scenes.append({})
            for arm in arms:
                made = _summarize(scene, arm, servers[arm.name], counted[arm.name])
                scenes[-1][arm.name] = made
                states[arm.name] = f"{made.requests} requests, {made.failed} failed, {made.skipped} left out"
    for arm in arms:
        _say(settings, arm, f"{states[arm.name]}; server stopped")
    return scenes


def _replay_scene(
    settings: Settings, scene: Scene, arms: Sequence[Arm], servers: Mapping[str, Server], replay: Replay
) -> None:
    """Replay a scene into its arms' folders."""
    with ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server.watch())
        replay([_replay_options(settings, scene, arm, servers[arm.name].base_url) for arm in arms])


def _summarize(scene: Scene, arm: Arm, server: Server, counted: dict[str, float]) -> ArmSummary:
    """Result of one arm on one scene; `counted` are the server's counters, before and after it."""
    folder = arm_folder(scene.folder, arm.name)
    try:
        metrics = server.get("/metrics")
    except OSError as error:
        server.check_alive(grace_s=2.0)
        raise BenchError(f"{server.base_url}/metrics gave {error}. Log: {server.log_path}") from error
    server.check_alive()
    write_whole(folder / "metrics.txt", metrics.encode())
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
