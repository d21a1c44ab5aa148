"""Runs the experiments: a server for each number format, every case in turn, a line for every record.

Owns what is measured in which order, what is left of an earlier run, and the progress line. It must not know how a case
is made or measured, or what records say.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import msgspec
from pic_traces.clock import split_clock
from tqdm import tqdm

from pic_bench.compare.summary import write_json
from pic_bench.environment import Environment, capture_environment, joined
from pic_bench.fidelity.config import Config
from pic_bench.fidelity.folder import (
    ENVIRONMENT,
    LEFT_OUT,
    PROBES,
    VAULT,
    LeftOut,
    read_environment,
    read_left_out,
    server_log,
    trace_mark,
)
from pic_bench.fidelity.jobs import Job, PassageJobs, qa_jobs
from pic_bench.fidelity.measure import Unrealised, measure_case
from pic_bench.fidelity.policies import parse_policy
from pic_bench.fidelity.questions import GENERATED, Question, generated_questions, is_question_set, read_questions
from pic_bench.fidelity.record import Experiment, Probe, read_probes, write_probes
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.fidelity.texts import TextPool, trace_texts
from pic_bench.fidelity.tokens import ModelText
from pic_bench.fidelity.trace import TraceCall, TraceRun, distinct_tokens, naive_policy, trace_calls
from pic_bench.fidelity.vault import Vault
from pic_bench.out_folder import CONFIG
from sglang_pic.errors import BenchError

__all__ = ["Outcome", "Plan", "chosen_questions", "make_plan", "run_fidelity"]

DEFAULT_TRACE = "sample:opendevin"
MAX_TEXT_QUESTIONS = 200
CASE_POOL_TOKENS = 60_000
MAX_POOL_TOKENS = 120_000
MAX_LEFT_OUT_SHARE = 0.1
_MIN_CASES = 20


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did."""

    measured: int
    resumed: int
    left_out: int
    """Prompts that were not served as meant, now or before."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run serves; once it is made, only a server is lacking."""

    config: Config
    text: ModelText
    passages: PassageJobs
    jobs: list[Job]
    calls: list[TraceCall]
    pool_tokens: int


def make_plan(config: Config, *, quiet: bool) -> Plan:
    """Read the data and put all prompts together.

    Raises:
        ConfigError: the model's folder or a size is of no use.
        TraceError: data cannot be read.
        BenchError: a prompt cannot be made of the data.
    """
    text = ModelText(Path(config.model))
    calls = _calls(config, text)
    passages = PassageJobs(config.sizes, TextPool(*_text_source(config), text), text, config.seed)
    return Plan(
        config=config,
        text=text,
        passages=passages,
        jobs=_jobs(config, passages, text),
        calls=calls,
        pool_tokens=config.pool_tokens or _pool_tokens(config, calls, quiet=quiet),
    )


def run_fidelity(plan: Plan, folder: Path, *, start_timeout_s: float, quiet: bool) -> Outcome:
    """Measure what is not measured yet.

    Raises:
        BenchError: a server failed, too many prompts were not served as meant, or what is there was measured on another
            machine or by other versions; what was measured stays.
        KeyboardInterrupt: Ctrl-C; the server is stopped, what was measured stays.
    """
    config, text, calls = plan.config, plan.text, plan.calls
    write_json(folder / CONFIG, config)
    done = _done(folder / PROBES)
    outcome = Outcome(measured=0, resumed=0, left_out=0)
    for dtype in config.dtypes:
        # Served again, they would be left out again.
        left = _left_out(folder, dtype)
        jobs = [*plan.jobs, *plan.passages.replacing(left)]
        todo = [job for job in jobs if done[_name(job, dtype)] < len(job.arms) and job.case.name not in left]
        resumed = len(jobs) - len(todo) - len(left)
        measured, tally = 0, _Tally(tried=resumed + len(left), left_out=len(left))
        wants_trace = bool(calls) and not trace_mark(folder, dtype).exists()
        if todo or wants_trace:
            write_json(folder / ENVIRONMENT, _environment(folder))
            _say(f"{dtype}: starting the server ...", quiet=quiet)
            with serve_target(
                config.model,
                dtype=dtype,
                pool_tokens=plan.pool_tokens,
                server_args=config.server_args,
                log_path=server_log(folder, dtype),
                start_timeout_s=start_timeout_s,
            ) as target:
                while todo:
                    before = tally.left_out
                    _measure_all(todo, target, text, config, folder, dtype, tally, quiet=quiet)
                    measured += len(todo) - (tally.left_out - before)
                    # As many prompts in every cell as were asked for.
                    known = {job.case.name for job in jobs}
                    todo = [
                        job for job in plan.passages.replacing(_left_out(folder, dtype)) if job.case.name not in known
                    ]
                    jobs += todo
                if wants_trace:
                    measured += _measure_trace(calls, target, text, config, folder, dtype, quiet=quiet)
        outcome = Outcome(
            measured=outcome.measured + measured,
            resumed=outcome.resumed + resumed,
            left_out=outcome.left_out + tally.left_out,
        )
    return outcome


def _left_out(folder: Path, dtype: str) -> list[str]:
    """The names of all prompts that were left out so far."""
    return [one.prompt for one in read_left_out(folder) if one.dtype == dtype]


def _environment(folder: Path) -> Environment:
    """Of this run, and of those that it goes on with."""
    here = capture_environment()
    if not (folder / ENVIRONMENT).exists():
        return here
    return joined([(str(folder), read_environment(folder)), ("this run", here)])


@dataclass(slots=True)
class _Tally:
    """The prompts of one number format, those of an earlier run too."""

    tried: int
    left_out: int


def _measure_all(
    jobs: Sequence[Job],
    target: Target,
    text: ModelText,
    config: Config,
    folder: Path,
    dtype: str,
    tally: _Tally,
    *,
    quiet: bool,
) -> None:
    page_size = _page_size(config.server_args)
    with _bar(sum(job.cost for job in jobs), dtype, quiet=quiet) as bar:
        for job in jobs:
            tally.tried += 1
            try:
                probes = measure_case(job.case, job.arms, target, text, job.wants, dtype=dtype, page_size=page_size)
                write_probes(folder / PROBES, probes)
            except Unrealised as error:
                _leave_out(folder, job, dtype, str(error))
                tally.left_out += 1
                if tally.tried >= _MIN_CASES and tally.left_out > MAX_LEFT_OUT_SHARE * tally.tried:
                    raise BenchError(
                        f"{tally.left_out} of {tally.tried} prompts were not served as meant; the last: {error}. "
                        f"All: {folder / LEFT_OUT}."
                    ) from error
            bar.set_description(f"{dtype} {job.case.name}", refresh=False)
            bar.update(job.cost)


def _measure_trace(
    calls: Sequence[TraceCall],
    target: Target,
    text: ModelText,
    config: Config,
    folder: Path,
    dtype: str,
    *,
    quiet: bool,
) -> int:
    """The number of records; what a pass that is broken off has measured is kept, and the pass served again."""
    probes = read_probes(folder / PROBES)
    policies = [parse_policy(policy) for policy in config.policies]
    measured = 0
    for source in dict.fromkeys(call.source for call in calls):
        of_source = [call for call in calls if call.source == source]
        vault = folder / VAULT / dtype / source.replace("/", "_")
        run = TraceRun(
            calls=of_source,
            policies=[*policies, naive_policy(policies[0])],
            orders=config.orders,
            target=target,
            text=text,
            vault=Vault(vault),
            dtype=dtype,
            min_chunk_hit=config.min_chunk_hit,
            greedy_calls=config.sizes.greedy_prompts,
            greedy_tokens=config.sizes.greedy_tokens,
            done={(p.prompt, p.arm) for p in probes if _is_of(p, Experiment.TRACE, dtype, source)},
        )
        total = run.num_passes * sum(len(call.prompt) for call in of_source)
        with _bar(total, f"{dtype} {source}", quiet=quiet) as bar:
            for step in run.steps():
                write_probes(folder / PROBES, step.probes)
                measured += len(step.probes)
                bar.set_description(f"{dtype} {source} {step.label}", refresh=False)
                bar.update(step.prompt_tokens)
    shutil.rmtree(folder / VAULT / dtype)
    trace_mark(folder, dtype).touch()
    return measured


def _is_of(probe: Probe, experiment: Experiment, dtype: str, source: str) -> bool:
    return probe.experiment is experiment and probe.dtype == dtype and probe.source == source


def _bar(total: int, name: str, *, quiet: bool) -> tqdm[NoReturn]:
    # Where nobody watches, a line every half minute is enough.
    interval = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=total, unit="tok", unit_scale=True, desc=name, file=sys.stderr, disable=quiet, mininterval=interval
    )


def _calls(config: Config, text: ModelText) -> list[TraceCall]:
    """The calls of all traces, one trace after the other; each trace has namespaces of its own."""
    if Experiment.TRACE not in config.experiments:
        return []
    traces = [name for name in config.data if not is_question_set(Path(name))] or [DEFAULT_TRACE]
    return [
        call for trace in traces for call in trace_calls(trace, _source(trace), text, config.model, config.sizes.calls)
    ]


def _source(trace: str) -> str:
    """What records call a trace: a file without its folder."""
    clock, _, rest = split_clock(trace)
    return clock + Path(rest).name


def _pool_tokens(config: Config, calls: Sequence[TraceCall], *, quiet: bool) -> int:
    """What the cases need, or a cache that loses nothing of a trace with room for a call in full."""
    if not calls:
        return CASE_POOL_TOKENS
    longest = max(len(call.prompt) + len(call.answer) for call in calls)
    wanted = distinct_tokens(calls) + 2 * longest
    if wanted > MAX_POOL_TOKENS:
        _say(
            f"trace: a cache that loses nothing needs a pool of {wanted} tokens; {MAX_POOL_TOKENS} are taken, and the "
            "least recently used rows are evicted. --max-total-tokens sets another pool.",
            quiet=quiet,
        )
    return max(CASE_POOL_TOKENS, min(wanted, MAX_POOL_TOKENS))


def _jobs(config: Config, passages: PassageJobs, text: ModelText) -> list[Job]:
    jobs: list[Job] = []
    if Experiment.GRID in config.experiments:
        jobs += passages.grid()
    if Experiment.SHIFT in config.experiments:
        jobs += passages.shift()
    if Experiment.QA in config.experiments:
        jobs += qa_jobs(config.sizes, chosen_questions(config), text, config.seed)
    return jobs


def _text_source(config: Config) -> tuple[str, list[str]]:
    """The text of GRID and SHIFT: of the first file."""
    name = config.data[0] if config.data else DEFAULT_TRACE
    path = Path(name)
    if not is_question_set(path):
        return _source(name), trace_texts(name)
    questions = read_questions(path, limit=MAX_TEXT_QUESTIONS, seed=config.seed)
    return path.name, list(dict.fromkeys(document for question in questions for document in question.documents))


def chosen_questions(config: Config) -> list[Question]:
    """Those of the files with questions, as many from each and in turn; generated ones where there is no such file."""
    limit, seed = config.sizes.questions, config.seed
    files = [path for name in config.data if is_question_set(path := Path(name))]
    if files:
        sources = [read_questions(path, limit=limit, seed=seed) for path in files]
    else:
        sources = [list(generated_questions(kind, limit=limit, seed=seed)) for kind in GENERATED]
    return [question for in_turn in zip_longest(*sources) for question in in_turn if question is not None]


def _leave_out(folder: Path, job: Job, dtype: str, reason: str) -> None:
    left = LeftOut(experiment=job.case.experiment, dtype=dtype, prompt=job.case.name, reason=reason)
    with (folder / LEFT_OUT).open("ab") as file:
        file.write(msgspec.json.encode(left) + b"\n")


def _name(job: Job, dtype: str) -> tuple[Experiment, str, str]:
    return job.case.experiment, dtype, job.case.name


def _done(path: Path) -> Counter[tuple[Experiment, str, str]]:
    """How many records every prompt has."""
    return Counter((probe.experiment, probe.dtype, probe.prompt) for probe in read_probes(path))


def _page_size(server_args: Sequence[str]) -> int:
    words = list(server_args)
    return int(words[words.index("--page-size") + 1]) if "--page-size" in words else 1


def _say(message: str, *, quiet: bool) -> None:
    if not quiet:
        print(message, file=sys.stderr, flush=True)
