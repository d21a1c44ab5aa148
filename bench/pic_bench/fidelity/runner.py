"""Runs the experiments: a server for each number format, every case and every pass in turn, a line for every record."""

from __future__ import annotations

import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pic_bench.environment import Environment, capture_environment, read_environment
from pic_bench.fidelity.cases.case import Job
from pic_bench.fidelity.config import LEFT_OUT, PROBES, VAULT, read_left_out, read_probes
from pic_bench.fidelity.measure import Step, Unrealised, measure
from pic_bench.fidelity.passes import PassRun, Vault
from pic_bench.fidelity.plan import Plan
from pic_bench.fidelity.record import Experiment, LeftOut, Probe, append_lines
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.out_folder import CONFIG, ENVIRONMENT, write_json
from pic_bench.study_command import progress
from sglang_pic.errors import BenchError

MAX_LEFT_OUT_SHARE = 0.1
_MIN_CASES = 20


@dataclass(slots=True)
class Outcome:
    """The progress of a run, in prompts; one that is served in passes counts once for each."""

    measured: int = 0
    resumed: int = 0
    left_out: int = 0
    """Not served as meant, in this run or before."""


def run_fidelity(plan: Plan, folder: Path, *, start_timeout_s: float, quiet: bool) -> Outcome:
    """Take the measurements that are missing.

    Raises:
        BenchError: a server failed, too many prompts were not served as meant, or what is there was measured on another
            machine or by other versions; what was measured stays.
        KeyboardInterrupt: Ctrl-C; the server is stopped, the records stay.
    """
    write_json(folder / CONFIG, plan.config)
    outcome = Outcome()
    for dtype in plan.config.dtypes:
        _FormatRun(plan, folder, dtype, outcome, quiet).measure(start_timeout_s)
    return outcome


@dataclass(slots=True)
class _FormatRun:
    """All that is measured in one number format."""

    plan: Plan
    folder: Path
    dtype: str
    outcome: Outcome
    quiet: bool

    def measure(self, start_timeout_s: float) -> None:
        """Serve the prompts without records; without any, no server is started."""
        probes = [probe for probe in read_probes(self.folder) if probe.dtype == self.dtype]
        jobs = self._missing_jobs(probes)
        # Says that the traces were measured to their end.
        mark = self.folder / f"trace-{self.dtype}.done"
        passes = [] if mark.exists() else self.plan.passes
        if not jobs and not passes:
            return
        write_json(self.folder / ENVIRONMENT, joined_environment(self.folder))
        if not self.quiet:
            print(f"{self.dtype}: starting the server ...", file=sys.stderr, flush=True)
        with serve_target(
            self.plan.config.model,
            dtype=self.dtype,
            pool_tokens=self.plan.pool_tokens,
            server_args=self.plan.config.server_args,
            log_path=self.folder / f"server-{self.dtype}.log",
            start_timeout_s=start_timeout_s,
        ) as target:
            if jobs:
                self._keep(self.dtype, sum(job.cost for job in jobs), self._measured(jobs, target))
            for each in passes:
                vault = Vault(self.folder / VAULT / self.dtype / each.source.replace("/", "_"))
                at = Experiment.TRACE, each.source
                done = {(probe.prompt, probe.arm) for probe in probes if (probe.experiment, probe.source) == at}
                run = PassRun(each, target, self.plan.text, vault, self.dtype, done)
                self._keep(f"{self.dtype} {each.source}", each.cost, run.steps())
            if self.plan.passes:
                mark.touch()
            shutil.rmtree(self.folder / VAULT / self.dtype, ignore_errors=True)

    def _missing_jobs(self, probes: Sequence[Probe]) -> list[Job]:
        """The prompts without a record; one that was left out would be left out again."""
        left_out = {one.prompt for one in read_left_out(self.folder) if one.dtype == self.dtype}
        by_prompt = defaultdict[tuple[Experiment, str], list[Probe]](list)
        for probe in probes:
            by_prompt[probe.experiment, probe.prompt].append(probe)
        tried = [job for job in self.plan.jobs if job.case.name not in left_out]
        missing = [job for job in tried if not job.is_done(by_prompt[job.case.experiment, job.case.name])]
        self.outcome.resumed += len(tried) - len(missing)
        self.outcome.left_out += len(left_out)
        return missing

    def _measured(self, jobs: Iterable[Job], target: Target) -> Iterator[Step]:
        for job in jobs:
            probes: list[Probe] = []
            try:
                probes = measure(job, target, self.plan.text, dtype=self.dtype)
            except Unrealised as error:
                self._leave_out(job, error)
            yield Step(job.case.name, job.cost, probes)

    def _leave_out(self, job: Job, error: Unrealised) -> None:
        case, outcome = job.case, self.outcome
        left = LeftOut(experiment=case.experiment, dtype=self.dtype, prompt=case.name, reason=str(error))
        append_lines(self.folder / LEFT_OUT, [left])
        outcome.left_out += 1
        tried = outcome.resumed + outcome.measured + outcome.left_out
        if tried >= _MIN_CASES and outcome.left_out > MAX_LEFT_OUT_SHARE * tried:
            raise BenchError(
                f"{outcome.left_out} of {tried} prompts were not served as meant; the last: {error}. "
                f"All: {self.folder / LEFT_OUT}."
            ) from error

    def _keep(self, name: str, total: int, steps: Iterable[Step]) -> None:
        """Write the records of every step, and show how many tokens of prompts are served."""
        with progress(total=total, unit="tok", unit_scale=True, desc=name, quiet=self.quiet) as bar:
            for step in steps:
                append_lines(self.folder / PROBES, step.probes)
                self.outcome.measured += bool(step.probes)
                bar.set_description(f"{name} {step.label}", refresh=False)
                bar.update(step.prompt_tokens)


def joined_environment(folder: Path) -> Environment:
    """Of this run, and of those that it continues.

    Raises:
        BenchError: those were made on another machine or by other versions.
    """
    here = capture_environment()
    if not (folder / ENVIRONMENT).exists():
        return here
    before = read_environment(folder)
    for field in ("cpu", "gpus", "versions", "variables"):
        if (there := getattr(before, field)) != (now := getattr(here, field)):
            raise BenchError(
                f"{field} is {there!r} in {folder} and {now!r} in this run; a report speaks of one machine and one set "
                "of versions."
            )
    return msgspec.structs.replace(
        before,
        command=_each_once(before.command, here.command),
        load_1min=max(before.load_1min, here.load_1min),
        commit=_each_once(before.commit or "unknown", here.commit or "unknown"),
        dirty=before.dirty or here.dirty,
    )


def _each_once(texts: str, text: str) -> str:
    """A list of texts with one more, unless it is there."""
    return "; ".join(dict.fromkeys([*texts.split("; "), text]))
