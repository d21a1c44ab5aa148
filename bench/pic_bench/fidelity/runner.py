"""Reads the traces of a run, and measures them: a server for each number format, a line for every record."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pic_bench.environment import joined_environment
from pic_bench.fidelity.arms import EXACT, parse_policy
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.config import PROBES, VAULT, Config, read_probes
from pic_bench.fidelity.passes import Passes, PassRun, Vault, trace_calls
from pic_bench.fidelity.record import append_lines
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.out_folder import CONFIG, ENVIRONMENT, write_json
from pic_bench.study_command import progress


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run serves; once it is made, only a server is lacking."""

    config: Config
    text: ModelText
    passes: list[Passes]


def make_plan(config: Config) -> Plan:
    """Read the traces; each has passes, and so a cache, of its own.

    Raises:
        ConfigError: the model's folder or a policy is of no use.
        TraceError: a trace cannot be read.
    """
    text = ModelText(Path(config.model))
    first, *others = map(parse_policy, config.policies)
    naive = msgspec.structs.replace(first, name="naive", rotate=False)
    passes = []
    for trace in config.data:
        source = Path(trace).name
        if calls := trace_calls(trace, source, text, config.model, config.calls):
            arms = (EXACT, *others, naive)
            passes.append(
                Passes(source=source, calls=calls, arms=arms, finder=first, min_chunk_hit=config.min_chunk_hit)
            )
    return Plan(config, text, passes)


def run_fidelity(plan: Plan, folder: Path, *, start_timeout_s: float, quiet: bool) -> int:
    """Take the measurements that are missing, and return how many prompts were served for them, once for each pass.

    Raises:
        BenchError: a server failed, or what is there was measured on another machine or by other versions; what was
            measured stays.
        KeyboardInterrupt: Ctrl-C; the server is stopped, the records stay.
    """
    write_json(folder / CONFIG, plan.config)
    return sum(_measure(plan, folder, dtype, start_timeout_s, quiet) for dtype in plan.config.dtypes)


def _measure(plan: Plan, folder: Path, dtype: str, start_timeout_s: float, quiet: bool) -> int:
    """All that is missing in one number format; where nothing is, no server is started."""
    config, vault = plan.config, folder / VAULT / dtype
    # Says that the traces were measured to their end.
    mark = folder / f"trace-{dtype}.done"
    if mark.exists() or not plan.passes:
        return 0
    write_json(folder / ENVIRONMENT, joined_environment(folder))
    if not quiet:
        print(f"{dtype}: starting the server ...", file=sys.stderr, flush=True)
    with serve_target(
        config.model,
        dtype=dtype,
        pool_tokens=config.pool_tokens,
        server_args=config.server_args,
        log_path=folder / f"server-{dtype}.log",
        start_timeout_s=start_timeout_s,
    ) as target:
        measured = 0
        for run in _runs(plan, folder, dtype, target):
            name = f"{dtype} {run.passes.source}"
            with progress(total=run.passes.cost, unit="tok", unit_scale=True, desc=name, quiet=quiet) as bar:
                for step in run.steps():
                    append_lines(folder / PROBES, step.probes)
                    measured += bool(step.probes)
                    bar.set_description(f"{name} {step.label}", refresh=False)
                    bar.update(step.prompt_tokens)
    mark.touch()
    shutil.rmtree(vault, ignore_errors=True)
    return measured


def _runs(plan: Plan, folder: Path, dtype: str, target: Target) -> Iterator[PassRun]:
    """The passes of every trace, less what an earlier run has measured."""
    probes = [probe for probe in read_probes(folder) if probe.dtype == dtype]
    for each in plan.passes:
        vault = Vault(folder / VAULT / dtype / each.source.replace("/", "_"))
        done = {(probe.prompt, probe.arm) for probe in probes if probe.source == each.source}
        yield PassRun(each, target, plan.text, vault, dtype, done)
