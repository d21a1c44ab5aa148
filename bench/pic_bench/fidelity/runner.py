"""Runs the experiments: a server for each number format, every case in turn, a line for every record."""

from __future__ import annotations

import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from tqdm import tqdm

from pic_bench.environment import Environment, capture_environment, joined
from pic_bench.fidelity.cases.case import Job
from pic_bench.fidelity.folder import (
    LEFT_OUT,
    PROBES,
    VAULT,
    read_environment,
    read_left_out,
    read_probes,
    trace_mark,
)
from pic_bench.fidelity.measure import Unrealised, measure
from pic_bench.fidelity.passes import TURNS_POLICIES, TraceRun, TurnsRun, Vault
from pic_bench.fidelity.plan import Plan, named_policies
from pic_bench.fidelity.record import Experiment, LeftOut, Probe, append_lines
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.out_folder import CONFIG, ENVIRONMENT, write_json
from sglang_pic.errors import BenchError

MAX_LEFT_OUT_SHARE = 0.1
_MIN_CASES = 20


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did."""

    measured: int
    resumed: int
    left_out: int
    """Prompts that were not served as meant, now or before."""


def run_fidelity(plan: Plan, folder: Path, *, start_timeout_s: float, quiet: bool) -> Outcome:
    """Measure what is not measured yet.

    Raises:
        BenchError: a server failed, too many prompts were not served as meant, or what is there was measured on another
            machine or by other versions; what was measured stays.
        KeyboardInterrupt: Ctrl-C; the server is stopped, what was measured stays.
    """
    write_json(folder / CONFIG, plan.config)
    runs = [_FormatRun(plan, folder, dtype, quiet=quiet) for dtype in plan.config.dtypes]
    for run in runs:
        run.measure(start_timeout_s)
    return Outcome(
        measured=sum(run.measured for run in runs),
        resumed=sum(run.resumed for run in runs),
        left_out=sum(run.left_out for run in runs),
    )


@dataclass(slots=True)
class _FormatRun:
    """All that is measured in one number format."""

    plan: Plan
    folder: Path
    dtype: str
    quiet: bool = field(kw_only=True)
    measured: int = 0
    resumed: int = 0
    left_out: int = 0

    def measure(self, start_timeout_s: float) -> None:
        """Serve what is not measured yet; a server is only started where there is anything."""
        config = self.plan.config
        probes = [probe for probe in read_probes(self.folder) if probe.dtype == self.dtype]
        done = defaultdict[tuple[Experiment, str], list[Probe]](list)
        for probe in probes:
            done[probe.experiment, probe.prompt].append(probe)
        # Served again, they would be left out again.
        left = self._names_left_out()
        jobs = [*self.plan.jobs, *self.plan.passages.replacing(left)]
        todo = [j for j in jobs if not j.is_done(done[j.case.experiment, j.case.name]) and j.case.name not in left]
        self.resumed, self.left_out = len(jobs) - len(todo) - len(left), len(left)
        traces, conversations = [*self._traces(probes)], [*self._conversations(probes)]
        if not todo and not traces and not conversations:
            return
        write_json(self.folder / ENVIRONMENT, _environment(self.folder))
        if not self.quiet:
            print(f"{self.dtype}: starting the server ...", file=sys.stderr, flush=True)
        with serve_target(
            config.model,
            dtype=self.dtype,
            pool_tokens=self.plan.pool_tokens,
            server_args=config.server_args,
            log_path=self.folder / f"server-{self.dtype}.log",
            start_timeout_s=start_timeout_s,
        ) as target:
            while todo:
                self._measure_jobs(todo, target)
                # As many prompts in every cell as were asked for.
                known = {job.case.name for job in jobs}
                replacing = self.plan.passages.replacing(self._names_left_out())
                todo = [job for job in replacing if job.case.name not in known]
                jobs += todo
            for trace in traces:
                self._measure_passes(trace(target=target))
            if traces:
                trace_mark(self.folder, self.dtype).touch()
            for conversation in conversations:
                self._measure_passes(conversation(target=target))
            shutil.rmtree(self.folder / VAULT / self.dtype, ignore_errors=True)

    def _measure_jobs(self, jobs: Sequence[Job], target: Target) -> None:
        words = list(self.plan.config.server_args)
        page_size = int(words[words.index("--page-size") + 1]) if "--page-size" in words else 1
        with self._bar(sum(job.cost for job in jobs), self.dtype) as bar:
            for job in jobs:
                try:
                    probes = measure(job, target, self.plan.text, dtype=self.dtype, page_size=page_size)
                    append_lines(self.folder / PROBES, probes)
                    self.measured += 1
                except Unrealised as error:
                    self._leave_out(job, error)
                bar.set_description(f"{self.dtype} {job.case.name}", refresh=False)
                bar.update(job.cost)

    def _leave_out(self, job: Job, error: Unrealised) -> None:
        case = job.case
        left = LeftOut(experiment=case.experiment, dtype=self.dtype, prompt=case.name, reason=str(error))
        append_lines(self.folder / LEFT_OUT, [left])
        self.left_out += 1
        tried = self.resumed + self.measured + self.left_out
        if tried >= _MIN_CASES and self.left_out > MAX_LEFT_OUT_SHARE * tried:
            raise BenchError(
                f"{self.left_out} of {tried} prompts were not served as meant; the last: {error}. "
                f"All: {self.folder / LEFT_OUT}."
            ) from error

    def _traces(self, probes: Sequence[Probe]) -> Iterator[Callable[..., TraceRun]]:
        """Every trace, but for the target; none where all were measured to their end."""
        calls = [] if trace_mark(self.folder, self.dtype).exists() else self.plan.calls
        for source in dict.fromkeys(call.source for call in calls):
            done = {(p.prompt, p.arm) for p in probes if p.experiment is Experiment.TRACE and p.source == source}
            of = [call for call in calls if call.source == source]
            common = self._common(source, source.replace("/", "_"), done)
            yield partial(TraceRun, config=self.plan.config, calls=of, **common)

    def _conversations(self, probes: Sequence[Probe]) -> Iterator[Callable[..., TurnsRun]]:
        """The conversations that lack a record, but for the target."""
        done = {(probe.prompt, probe.arm) for probe in probes if probe.experiment is Experiment.TURNS}
        policies = named_policies(self.plan.config) or TURNS_POLICIES
        for turns in self.plan.conversations:
            arms = [arm for arm in policies if any((case.name, arm.name) not in done for case in turns)]
            if arms:
                yield partial(
                    TurnsRun, turns=turns, arms=arms, **self._common(turns[0].source, f"turns-{turns[0].source}", done)
                )

    def _common(self, source: str, folder: str, done: set[tuple[str, str]]) -> dict[str, Any]:
        """What every kind of passes is made with; what a pass that was broken off has measured is kept."""
        vault = Vault(self.folder / VAULT / self.dtype / folder)
        return {"source": source, "text": self.plan.text, "vault": vault, "dtype": self.dtype, "done": done}

    def _measure_passes(self, run: TraceRun | TurnsRun) -> None:
        with self._bar(run.cost, f"{self.dtype} {run.source}") as bar:
            for step in run.steps():
                append_lines(self.folder / PROBES, step.probes)
                self.measured += len(step.probes)
                bar.set_description(f"{self.dtype} {run.source} {step.label}", refresh=False)
                bar.update(step.prompt_tokens)

    def _names_left_out(self) -> list[str]:
        """The names of all prompts that were left out so far."""
        return [one.prompt for one in read_left_out(self.folder) if one.dtype == self.dtype]

    def _bar(self, total: int, name: str) -> tqdm[NoReturn]:
        # Where nobody watches, a line every half minute is enough.
        interval = 0.5 if sys.stderr.isatty() else 30.0
        told = {"disable": self.quiet, "mininterval": interval, "file": sys.stderr}
        return tqdm(total=total, unit="tok", unit_scale=True, desc=name, **told)


def _environment(folder: Path) -> Environment:
    """Of this run, and of those that it continues."""
    here = capture_environment()
    if not (folder / ENVIRONMENT).exists():
        return here
    return joined([(str(folder), read_environment(folder)), ("this run", here)])
