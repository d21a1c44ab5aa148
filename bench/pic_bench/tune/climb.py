"""Serves the drawn calls as exact hits, unrotated, and under rung after rung, and writes a line for every record.

A rung is served only where the one before it is certified, and no further than its verdict can change. So a run may be
broken off at any moment, by the user or by a time limit, and what it has shown by then holds.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pic_bench.environment import joined_environment
from pic_bench.fidelity.arms import EXACT, Arm
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.passes import GOLD_TOKENS, Call, Passes, PassRun, Vault
from pic_bench.fidelity.record import Probe, append_lines, read_lines, whole_lines
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.out_folder import ENVIRONMENT, read_json, write_json
from pic_bench.study_command import progress
from pic_bench.tune.config import CERTIFICATE, FLIPPED, GOLDS, NAIVE, RECORDS, SERVED, VAULT, Config
from pic_bench.tune.ladder import worth_climbing
from pic_bench.tune.running import attach
from pic_bench.tune.sample import SOURCE, Drawn
from pic_bench.tune.verdict import Judge, Verdict
from sglang_pic.certificate import Served
from sglang_pic.errors import BenchError
from sglang_pic.output import write_whole


def climb(
    config: Config, drawn: Drawn, text: ModelText, folder: Path, *, until: float, start_timeout_s: float, quiet: bool
) -> None:
    """Measure what is missing, as far as it matters; a server is only started or asked where there is anything.

    Args:
        until: on the monotonic clock, when no further call is served.

    Raises:
        BenchError: the server failed, or what is there was measured on another machine or by other versions.
        KeyboardInterrupt: Ctrl-C; the server is stopped, and what was measured stays.
    """
    records = folder / RECORDS
    # The next record begins on a line of its own.
    write_whole(records, whole_lines(records))
    rungs = tuple(worth_climbing(drawn.sample.reuse))
    naive = msgspec.structs.replace(rungs[-1], name=NAIVE, rotate=False)
    flipped = msgspec.structs.replace(rungs[-1], name=FLIPPED, flip=True)
    judge = Judge(drawn.sample, config.budget, read_lines(records, Probe))
    run = _Climb(judge, drawn, text, folder, (EXACT, naive, flipped, *rungs), until, quiet)
    if run.next_arm() is None:
        return
    write_json(folder / ENVIRONMENT, joined_environment(folder))
    with _target(config, folder, until, start_timeout_s, quiet) as target:
        _keep_served(target, folder / SERVED)
        if run.serve(target, config.dtype):
            shutil.rmtree(folder / VAULT, ignore_errors=True)
        else:
            print("sglang-pic: the time limit is reached; --resume goes on from here", file=sys.stderr)


def _target(
    config: Config, folder: Path, until: float, start_timeout_s: float, quiet: bool
) -> AbstractContextManager[Target]:
    """The server that the run names, or one that is started and stopped."""
    if config.server is not None:
        return nullcontext(attach(config.server, config.model, until=until))
    if not quiet:
        print("starting the server ...", file=sys.stderr, flush=True)
    return serve_target(
        config.model,
        dtype=config.dtype,
        pool_tokens=config.pool_tokens,
        server_args=config.server_args,
        log_path=folder / "server.log",
        start_timeout_s=start_timeout_s,
        certificate=folder / CERTIFICATE,
    )


@dataclass(frozen=True, slots=True)
class _Climb:
    """The arms in the order in which they are served: exact hits with the full prefills, controls, the ladder."""

    judge: Judge
    drawn: Drawn
    text: ModelText
    folder: Path
    arms: Sequence[Arm]
    until: float
    quiet: bool

    def next_arm(self) -> Arm | None:
        """What is to be served next; None where no verdict can change any more."""
        for arm in self.arms:
            if not self._is_decided(arm):
                return arm
            if arm in self._rungs and self.judge.judge(arm.name).verdict is not Verdict.CERTIFIED:
                break
        return None

    def serve(self, target: Target, dtype: str) -> bool:
        """Serve arm after arm; whether all was served in time."""
        calls, measured = [*self._answered(target)], self.drawn.measured
        passes = Passes(source=SOURCE, calls=calls, arms=(), measured=measured, controls=(EXACT,))
        done = frozenset((probe.prompt, probe.arm) for probe in self.judge.probes)
        run = PassRun(passes, target, self.text, Vault(self.folder / VAULT), dtype, done)
        # Also where their records are there: all passes need them from the vault.
        arm: Arm | None = EXACT
        while arm is not None:
            is_exact = arm is EXACT
            steps = run.controls() if is_exact else run.serve(arm)
            total = len(measured if is_exact else calls)
            for step in progress(iterable=steps, total=total, desc=arm.name, unit="call", quiet=self.quiet):
                append_lines(self.folder / RECORDS, step.probes)
                self.judge.probes += step.probes
                if step.probes and not is_exact and self._is_decided(arm):
                    break
                if time.monotonic() >= self.until:
                    return False
            if not self.quiet:
                print(f"{arm.name}: {self.judge.judge(arm.name).verdict.value}", file=sys.stderr)
            arm = self.next_arm()
        return True

    def _answered(self, target: Target) -> Iterator[Call]:
        """The calls; where a measured one has no recorded answer, with the beginning of the full prefill's own."""
        path = self.folder / GOLDS
        golds = read_json(path, dict[str, list[int]], "answers of this run") if path.exists() else {}
        for call in self.drawn.calls:
            case = call.case
            if case.gold or case.name not in self.drawn.measured:
                yield call
                continue
            if case.name not in golds:
                golds[case.name] = target.greedy(case.prompt, GOLD_TOKENS, key=f"answer/{case.name}")
                write_json(path, golds)
            yield replace(call, case=replace(case, gold=golds[case.name]))

    @property
    def _rungs(self) -> Sequence[Arm]:
        return self.arms[3:]

    def _is_decided(self, arm: Arm) -> bool:
        # The first rung is measured to its end, so that it can be said how many sessions it takes.
        return self.judge.is_decided(arm.name, may_fail=arm not in (EXACT, self._rungs[0]))


def _keep_served(target: Target, path: Path) -> None:
    """Write down what the server says a certificate is compared with; an error where an earlier part has another."""
    (state, *_) = msgspec.json.decode(target.server.get("/server_info"))["internal_states"]
    here = msgspec.convert(state["pic"]["certificate"]["here"], Served)
    if path.exists() and (there := read_json(path, Served, "what a server serves")) != here:
        raise BenchError(f"{path}: this run began on another server ({there}; here {here}); begin a new one.")
    write_json(path, here)
