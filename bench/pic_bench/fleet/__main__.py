"""Replays a trace against several servers behind the gateway: by its own policies, and by `sglang-pic route`.

All arms have the same servers, emptied before each arm, and the same gateway `smg`, started anew; for `content` its
only worker is HAProxy, which asks the sidecar. With --kill the last two arms are the gateway's own policy and content,
while one server is killed and started again.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
from pic_replay import ReplayOptions, run_replay
from pic_replay.records import ReplaySummary, load_summary
from pic_traces.source import short_name

from pic_bench.compare.arms import arm_server, build_arms
from pic_bench.compare.server import Server, free_port, pic_counters
from pic_bench.frame import Finding, Result, Study, add_options, keep, result_of
from pic_bench.report.markdown import Table, markdown_table
from pic_bench.serving import side_by_side
from sglang_pic.config import CONFIG_VARIABLE
from sglang_pic.errors import BenchError

CONTENT = "content"
_COMPUTED = "sglang:pic_tokens_total{source=computed}"
_BYTES = "sglang:pic_content_events_bytes_total"
# A server that comes back is used again within seconds; by default minutes. SGLang's answer to a health check waits for
# prefills, which on a busy CPU take longer than the gateway waits by default: it would send requests elsewhere.
_GATEWAY_FLAGS = (
    *("--log-level", "warn"),
    *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "60"),
    *("--health-success-threshold", "1", "--cb-timeout-duration-secs", "5"),
)
_CLI = "import sys; from sglang_pic.cli import main; sys.exit(main())"
# What the servers tell last is on its way for so long.
_SETTLE_S = 2.0
_REGISTER_S = 120.0

STUDY = Study("fleet", __doc__)
STUDY.options("model", "server-arg", "limit-sessions", "limit-calls", "logs")
STUDY.options("sessions", "max-tokens", sessions=6, max_tokens=8)
add_options(STUDY.parser, Path(__file__).with_name("options.toml"))


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm."""

    policy: str
    is_killed: bool
    """Whether a server was killed and started again meanwhile."""
    planned: int
    completed: int
    failed: int
    prompt_tokens: int
    computed_tokens: int
    """Of completed requests."""
    ttft_p50_s: float
    ttft_p99_s: float
    computed_by_server: list[int]
    """Empty where a server was killed, whose counts are lost."""
    event_bytes: int
    """Of content events, all servers, for one listener; with a killed server 0."""
    requests: dict[str, int]
    """What the sidecar answered; empty without it."""

    @property
    def busiest(self) -> float:
        """Computed tokens of the busiest server, over the mean."""
        return max(self.computed_by_server) / max(1.0, statistics.mean(self.computed_by_server))


class Fleet(Result, frozen=True, kw_only=True):
    """The result."""

    model: str
    trace: str
    servers: int
    sessions: int
    max_tokens: int
    gateway: str = "smg"
    arms: list[Outcome]


@STUDY.measures
def main(args: argparse.Namespace, scratch: Path) -> Finding:
    """Run all arms; the result so far is kept after each."""
    logs: Path = (args.logs or scratch).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    arms = [(policy, False) for policy in args.policies.split(",")]
    arms += [("cache_aware", True), (CONTENT, True)] if args.kill else []
    outcomes: list[Outcome] = []
    with _members(args, logs) as members:
        for policy, is_killed in arms:
            print(f"{policy}{', a server killed' if is_killed else ''}", file=sys.stderr, flush=True)
            outcomes.append(_measure(args, logs, members, policy, is_killed))
            print(markdown_table(_table(outcomes)), file=sys.stderr, flush=True)
            result = result_of(Fleet, args, model=Path(args.model).name, trace=short_name(args.trace), arms=outcomes)
            keep(args, result)
    if args.page is not None:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text(_page(result), "utf8")
    return Finding(result, _table(outcomes), 0 if not any(arm.failed for arm in outcomes if not arm.is_killed) else 1)


class _Member(NamedTuple):
    """A server, and where it tells content events."""

    server: Server
    events: str


@contextmanager
def _members(args: argparse.Namespace, logs: Path) -> Iterator[list[_Member]]:
    salt = logs / "salt"
    salt.write_text(secrets.token_hex(24))
    flags = [word for text in args.server_arg for word in shlex.split(text)]
    (arm,) = build_arms(["pic"], server_args=flags, pic_config=None)
    members = []
    for number in range(args.servers):
        events = f"tcp://127.0.0.1:{free_port()}"
        config = msgspec.json.encode({"content_events": {"endpoint": events, "salt_file": str(salt)}}).decode()
        server = arm_server(args.model, arm, logs / f"server-{number}.log", env={CONFIG_VARIABLE: config})
        members.append(_Member(server, events))
    with side_by_side([member.server for member in members]):
        yield members


def _measure(args: argparse.Namespace, logs: Path, members: Sequence[_Member], policy: str, is_killed: bool) -> Outcome:
    """Replay the trace through a gateway of its own, against empty servers."""
    for member in members:
        member.server.post("/flush_cache", {})
    before = [pic_counters(member.server.get("/metrics")) for member in members]
    folder = Path(tempfile.mkdtemp(prefix=f"{policy}-", dir=logs))
    workers = [member.server for member in members]
    with ExitStack() as stack:
        if policy == CONTENT:
            command, sidecar = _sidecar(args, logs, folder, members)
            stack.enter_context(sidecar)
            workers = [stack.enter_context(_haproxy(command, folder))]
        entry = stack.enter_context(_gateway(args, folder, workers, "round_robin" if policy == CONTENT else policy))
        _wait_for_workers(entry, len(workers))
        with _killing(members[-1].server, args.kill) if is_killed else nullcontext():
            summary = _replay(args, entry.base_url, folder)
        status = msgspec.json.decode(sidecar.get("/status")) if policy == CONTENT else {}
    time.sleep(_SETTLE_S)
    after = [{} if is_killed else pic_counters(member.server.get("/metrics")) for member in members]
    pairs = zip(after, before, strict=True)
    grown = [{name: count - was.get(name, 0.0) for name, count in now.items()} for now, was in pairs]
    return Outcome(
        policy=policy,
        is_killed=is_killed,
        planned=summary.planned,
        completed=summary.completed,
        failed=summary.failed,
        prompt_tokens=summary.prompt_tokens,
        computed_tokens=summary.computed_tokens or 0,
        ttft_p50_s=summary.ttft_s.p50 or 0.0,
        ttft_p99_s=summary.ttft_s.p99 or 0.0,
        computed_by_server=[] if is_killed else [round(counts.get(_COMPUTED, 0.0)) for counts in grown],
        event_bytes=round(sum(counts.get(_BYTES, 0.0) for counts in grown)),
        requests=status.get("requests", {}),
    )


def _gateway(args: argparse.Namespace, folder: Path, workers: Sequence[Server], policy: str) -> Server:
    port, metrics_port = free_port(), free_port()
    urls = [worker.base_url for worker in workers]
    command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--worker-urls", *urls, "--policy", policy, *_GATEWAY_FLAGS]
    path = os.pathsep.join(filter(None, [str(args.gateway_path.resolve()), os.environ.get("PYTHONPATH")]))
    return Server(command, port=port, log_path=folder / "gateway.log", env={"PYTHONPATH": path})


def _wait_for_workers(gateway: Server, number: int) -> None:
    """The gateway is healthy before it knows its servers."""
    deadline = time.monotonic() + _REGISTER_S
    while sum(worker["is_healthy"] for worker in msgspec.json.decode(gateway.get("/workers"))["workers"]) < number:
        if time.monotonic() > deadline:
            raise BenchError(f"the gateway has not found its {number} servers; its log: {gateway.log_path}")
        time.sleep(1)


def _sidecar(
    args: argparse.Namespace, logs: Path, folder: Path, members: Sequence[_Member]
) -> tuple[list[str], Server]:
    """Its command, and the sidecar."""
    port = free_port()
    command = [sys.executable, "-c", _CLI, "route", "--port", str(port)]
    command += [f"--server={member.server.base_url}={member.events}" for member in members]
    more = ["--salt-file", str(logs / "salt"), "--tokenizer", args.model]
    return command, Server([*command, *more], port=port, log_path=folder / "sidecar.log")


def _haproxy(command: Sequence[str], folder: Path) -> Server:
    port = free_port()
    printed = subprocess.run([*command, "--haproxy", f"127.0.0.1:{port}"], check=True, capture_output=True)
    path = folder / "haproxy.cfg"
    path.write_bytes(printed.stdout)
    return Server(["haproxy", "-db", "-f", str(path)], port=port, log_path=folder / "haproxy.log")


def _replay(args: argparse.Namespace, base_url: str, folder: Path) -> ReplaySummary:
    options = ReplayOptions(
        trace=args.trace,
        base_url=base_url,
        out=str(folder / "replay"),
        sessions=args.sessions,
        limit_sessions=args.limit_sessions,
        limit_calls=args.limit_calls,
        max_tokens=args.max_tokens,
        # Whoever starts has read its tokenizer by then.
        warmup=4 * args.servers,
        force=True,
    )
    return load_summary(run_replay(options))


@contextmanager
def _killing(server: Server, after_s: float) -> Iterator[None]:
    """Kill a server so many seconds after the body began, and start it again; the body's end waits for that."""
    failures: list[BaseException] = []

    def kill() -> None:
        time.sleep(after_s)
        try:
            os.killpg(server.pid, signal.SIGKILL)
            server.stop()
            server.__enter__()
        except BaseException as error:
            failures.append(error)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        yield
    finally:
        killer.join()
    if failures:
        raise failures[0]


def _table(arms: Sequence[Outcome]) -> Table:
    header = ["arm", "completed", "failed", "computed", "of prompts", "busiest / mean", "TTFT p50", "TTFT p99"]
    rows = [
        [
            f"{arm.policy}, a server killed" if arm.is_killed else arm.policy,
            f"{arm.completed:,} of {arm.planned:,}",
            f"{arm.failed:,}",
            f"{arm.computed_tokens:,}",
            f"{arm.computed_tokens / max(1, arm.prompt_tokens):.1%}",
            f"{arm.busiest:.2f}" if arm.computed_by_server else "-",
            f"{arm.ttft_p50_s:.2f} s",
            f"{arm.ttft_p99_s:.2f} s",
            "-" if arm.is_killed else f"{arm.event_bytes / 1000:,.0f} kB",
        ]
        for arm in arms
    ]
    return Table([*header, "events"], rows)


def _page(fleet: Fleet) -> str:
    steered = "\n".join(f"- {arm.policy}: {arm.requests}" for arm in fleet.arms if arm.requests)
    return f"""\
# {fleet.servers} servers behind {fleet.gateway}

{fleet.trace} on {fleet.model}, {fleet.sessions} sessions at once, {fleet.max_tokens} output tokens. All servers run \
the plugin. `content` is HAProxy with `sglang-pic route`, as the gateway's only worker; the other arms are its own \
policies. Computed tokens are those of completed requests, events the bytes for one listener.

{markdown_table(_table(fleet.arms))}

What the sidecar answered:
{steered}
"""


if __name__ == "__main__":
    sys.exit(main())
