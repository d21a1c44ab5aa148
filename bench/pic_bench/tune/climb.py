"""Serves the drawn calls as exact hits, unrotated, and under rung after rung, and writes a line for every record.

A rung is served only where the one before it is certified, and no further than its verdict can change. So a run may be
broken off at any moment, by the user or by a time limit, and what it has shown by then holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tqdm import tqdm

from pic_bench.fidelity.arms import EXACT, FULL, RECORDED, Arm
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.measure import Step
from pic_bench.fidelity.passes import Passes, PassRun, Vault
from pic_bench.fidelity.record import Probe, append_lines, read_lines, whole_lines
from pic_bench.fidelity.runner import joined_environment
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.out_folder import ENVIRONMENT, read_json, write_json, write_whole
from pic_bench.tune.config import CERTIFICATE, NAIVE, RECORDS, SERVED, VAULT, Config
from pic_bench.tune.ladder import worth_climbing
from pic_bench.tune.sample import SOURCE, Drawn
from pic_bench.tune.verdict import Verdict, is_settled, judge, judge_control
from sglang_pic.certificate import Served
from sglang_pic.errors import BenchError


class _TimeIsUp(Exception):
    """The time limit was reached."""


@dataclass(slots=True)
class Climb:
    """One run on one server.

    Args:
        until: on the monotonic clock, when no further call is served.
    """

    config: Config
    drawn: Drawn
    text: ModelText
    folder: Path
    until: float
    quiet: bool
    _probes: list[Probe] = field(default_factory=list)

    def measure(self, start_timeout_s: float) -> None:
        """Measure what is missing, as far as it matters.

        Raises:
            BenchError: the server failed, or what is there was measured on another machine or by other versions.
            KeyboardInterrupt: Ctrl-C; the server is stopped.
        """
        records = self.folder / RECORDS
        # The next record begins on a line of its own.
        write_whole(records, whole_lines(records))
        self._probes = read_lines(records, Probe)
        rungs = list(worth_climbing(self.drawn.sample.reuse))
        write_json(self.folder / ENVIRONMENT, joined_environment(self.folder))
        if not self.quiet:
            print(f"{self.config.dtype}: starting the server ...", file=sys.stderr, flush=True)
        with serve_target(
            self.config.model,
            dtype=self.config.dtype,
            pool_tokens=self.config.pool_tokens,
            server_args=self.config.server_args,
            log_path=self.folder / "server.log",
            start_timeout_s=start_timeout_s,
            certificate=self.folder / CERTIFICATE,
        ) as target:
            self._keep_served(target)
            try:
                self._climb(target, rungs)
            except _TimeIsUp:
                print("sglang-pic: the time limit is reached; --resume goes on from here", file=sys.stderr)

    def _climb(self, target: Target, rungs: Sequence[Arm]) -> None:
        sample, budget = self.drawn.sample, self.config.budget
        passes = Passes(source=SOURCE, calls=self.drawn.calls, arms=(), measured=self.drawn.measured, controls=(EXACT,))
        done = frozenset((probe.prompt, probe.arm) for probe in self._probes)
        run = PassRun(passes, target, self.text, Vault(self.folder / VAULT), self.config.dtype, done)
        self._keep(FULL.name, sample.sessions, run.controls(RECORDED))
        naive = msgspec.structs.replace(rungs[-1], name=NAIVE, rotate=False)
        if judge_control(NAIVE, self._probes, sample, budget).verdict is not Verdict.OVER:
            for _ in self._served(run, naive):
                if judge_control(NAIVE, self._probes, sample, budget).verdict is Verdict.OVER:
                    break
        for number, rung in enumerate(rungs):
            judged = judge(rung.name, self._probes, sample, budget)
            # The first is measured to its end, so that it can be said how many sessions it takes.
            if number == 0 or not is_settled(judged, self._probes, sample, budget):
                for _ in self._served(run, rung):
                    judged = judge(rung.name, self._probes, sample, budget)
                    if number > 0 and is_settled(judged, self._probes, sample, budget):
                        break
            if judged.verdict is not Verdict.CERTIFIED:
                return

    def _served(self, run: PassRun, arm: Arm) -> Iterable[Step]:
        return self._kept(arm.name, len(self.drawn.calls), run.serve(RECORDED, arm))

    def _keep(self, name: str, total: int, steps: Iterable[Step]) -> None:
        for _ in self._kept(name, total, steps):
            pass

    def _kept(self, name: str, total: int, steps: Iterable[Step]) -> Iterable[Step]:
        """Write the records of every step, show how many calls are served, and hand on the steps with records."""
        interval = 0.5 if sys.stderr.isatty() else 30.0
        told = {"disable": self.quiet, "mininterval": interval, "file": sys.stderr}
        for step in tqdm(steps, total=total, unit="call", desc=name, **told):
            append_lines(self.folder / RECORDS, step.probes)
            self._probes += step.probes
            if step.probes:
                yield step
            if time.monotonic() >= self.until:
                raise _TimeIsUp

    def _keep_served(self, target: Target) -> None:
        """Write down what the server says a certificate is compared with.

        Raises:
            BenchError: an earlier part of this run was measured on something else.
        """
        (state, *_) = msgspec.json.decode(target.server.get("/server_info"))["internal_states"]
        here = msgspec.convert(state["pic"]["certificate"]["here"], Served)
        path = self.folder / SERVED
        if path.exists() and (there := read_json(path, Served, "what a server serves")) != here:
            raise BenchError(f"{path}: this run began on another server ({there}; here {here}); begin a new one.")
        write_json(path, here)
