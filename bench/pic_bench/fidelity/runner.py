"""Runs the experiments: a server for each number format, every case in turn, a line for every record.

Owns the run's folder while it is written, what an earlier run left there, and the progress line. It must not know how a
case is made or measured, or what records say.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import msgspec
from tqdm import tqdm

from pic_bench.environment import capture_environment
from pic_bench.fidelity.config import KIND, Config
from pic_bench.fidelity.jobs import Job, grid_jobs, qa_jobs, shift_jobs
from pic_bench.fidelity.measure import Unrealised, measure_case
from pic_bench.fidelity.policies import parse_policy
from pic_bench.fidelity.questions import GENERATED, Question, generated_questions, is_question_set, read_questions
from pic_bench.fidelity.record import Experiment, Probe, read_probes, write_probes
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.fidelity.texts import TextPool, trace_texts
from pic_bench.fidelity.tokens import ModelText
from pic_bench.fidelity.trace import TraceCall, TraceRun, distinct_tokens, naive_policy, trace_calls
from pic_bench.fidelity.vault import Vault
from pic_bench.summary import write_json
from sglang_pic.errors import BenchError, ConfigError

__all__ = ["LeftOut", "Outcome", "chosen_questions", "claim_folder", "run_fidelity"]

PROBES = "probes.jsonl"
LEFT_OUT = "left_out.jsonl"
VAULT = "vault"
DEFAULT_TRACE = "sample:opendevin"
MAX_TEXT_QUESTIONS = 200
CASE_POOL_TOKENS = 60_000
MAX_POOL_TOKENS = 120_000
MAX_LEFT_OUT_SHARE = 0.1
_MIN_CASES = 20


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt that was not served as meant, and so is in no record; a line of `left_out.jsonl`."""

    schema_version: int = 1
    experiment: Experiment
    dtype: str
    prompt: str
    reason: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did."""

    measured: int
    resumed: int
    left_out: list[LeftOut]


def claim_folder(folder: Path, config: Config, *, resume: bool, force: bool) -> None:
    """Make `folder` ready for a run: new, or an earlier run's that is continued or, with `force`, deleted.

    Raises:
        ConfigError: it holds something else, an earlier run that neither flag speaks of, or another configuration's.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {str(folder)!r} is a file; give a folder that does not exist or is empty.")
    if folder.is_dir() and any(folder.iterdir()):
        found = _read_config(folder)
        if found is None:
            raise ConfigError(f"--out {str(folder)!r} is not empty and is no earlier fidelity run; give a new folder.")
        if resume:
            if differing := _differing(found, config):
                raise ConfigError(
                    f"--resume: {folder / 'config.json'} says another run than this command: {'; '.join(differing)}. "
                    "Repeat its arguments, or give a new folder."
                )
            _drop_cut_line(folder / PROBES)
            return
        if not force:
            raise ConfigError(f"--out {str(folder)!r} holds an earlier run; add --resume or --force.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _differing(found: Config, wanted: Config) -> list[str]:
    """What an earlier run's configuration says otherwise."""
    there, here = (msgspec.to_builtins(config) for config in (found, wanted))
    return [f"{name} is {there[name]!r} there and {here[name]!r} here" for name in there if there[name] != here[name]]


def run_fidelity(config: Config, folder: Path, *, start_timeout_s: float, quiet: bool) -> Outcome:
    """Measure what is not measured yet.

    Raises:
        TraceError: data cannot be read.
        BenchError: a server failed, or too many prompts were not served as meant; what was measured stays.
        KeyboardInterrupt: Ctrl-C; the server is stopped, what was measured stays.
    """
    text = ModelText(Path(config.model))
    pool = TextPool(*_text_source(config), text)
    write_json(folder / "config.json", config)
    write_json(folder / "environment.json", capture_environment())
    jobs = _jobs(config, pool, text)
    calls = _calls(config, text)
    pool_tokens = config.pool_tokens or _pool_tokens(config, calls, quiet=quiet)
    done = _done(folder / PROBES)
    outcome = Outcome(measured=0, resumed=0, left_out=[])
    for dtype in config.dtypes:
        todo = [job for job in jobs if done[_name(job, dtype)] < len(job.arms)]
        outcome = msgspec.structs.replace(outcome, resumed=outcome.resumed + len(jobs) - len(todo))
        wants_trace = bool(calls) and not _trace_mark(folder, dtype).exists()
        if not todo and not wants_trace:
            continue
        measured = 0
        _say(f"{dtype}: starting the server ...", quiet=quiet)
        with serve_target(
            config.model,
            dtype=dtype,
            pool_tokens=pool_tokens,
            server_args=config.server_args,
            log_path=folder / f"server-{dtype}.log",
            start_timeout_s=start_timeout_s,
        ) as target:
            left_out = _measure_all(todo, target, text, config, folder, dtype, quiet=quiet)
            if wants_trace:
                measured += _measure_trace(calls, target, text, config, folder, dtype, quiet=quiet)
        outcome = msgspec.structs.replace(
            outcome,
            measured=outcome.measured + measured + len(todo) - len(left_out),
            left_out=[*outcome.left_out, *left_out],
        )
    return outcome


def _measure_all(
    jobs: Sequence[Job],
    target: Target,
    text: ModelText,
    config: Config,
    folder: Path,
    dtype: str,
    *,
    quiet: bool,
) -> list[LeftOut]:
    left_out: list[LeftOut] = []
    page_size = _page_size(config.server_args)
    with _bar(sum(job.cost for job in jobs), dtype, quiet=quiet) as bar:
        for number, job in enumerate(jobs, 1):
            try:
                probes = measure_case(job.case, job.arms, target, text, job.wants, dtype=dtype, page_size=page_size)
                write_probes(folder / PROBES, probes)
            except Unrealised as error:
                left_out.append(_leave_out(folder, job, dtype, str(error)))
                if number >= _MIN_CASES and len(left_out) > MAX_LEFT_OUT_SHARE * number:
                    raise BenchError(
                        f"{len(left_out)} of {number} prompts were not served as meant; the last: {error}. "
                        f"All: {folder / LEFT_OUT}."
                    ) from error
            bar.set_description(f"{dtype} {job.case.name}", refresh=False)
            bar.update(job.cost)
    return left_out


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
    probes = read_probes(folder / PROBES) if (folder / PROBES).exists() else []
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
    _trace_mark(folder, dtype).touch()
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
        call
        for trace in traces
        for call in trace_calls(trace, Path(trace).name, text, config.model, config.sizes.calls)
    ]


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


def _trace_mark(folder: Path, dtype: str) -> Path:
    """A file that says that a trace was measured to its end."""
    return folder / f"trace-{dtype}.done"


def _jobs(config: Config, pool: TextPool, text: ModelText) -> list[Job]:
    jobs: list[Job] = []
    if Experiment.GRID in config.experiments:
        jobs += grid_jobs(config.sizes, pool, text, config.seed)
    if Experiment.SHIFT in config.experiments:
        jobs += shift_jobs(config.sizes, pool, text, config.seed)
    if Experiment.QA in config.experiments:
        jobs += qa_jobs(config.sizes, chosen_questions(config), text, config.seed)
    return jobs


def _text_source(config: Config) -> tuple[str, list[str]]:
    """The text of GRID and SHIFT: of the first file."""
    name = config.data[0] if config.data else DEFAULT_TRACE
    path = Path(name)
    if not is_question_set(path):
        return path.name, trace_texts(name)
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


def _leave_out(folder: Path, job: Job, dtype: str, reason: str) -> LeftOut:
    left = LeftOut(experiment=job.case.experiment, dtype=dtype, prompt=job.case.name, reason=reason)
    with (folder / LEFT_OUT).open("ab") as file:
        file.write(msgspec.json.encode(left) + b"\n")
    return left


def _name(job: Job, dtype: str) -> tuple[Experiment, str, str]:
    return job.case.experiment, dtype, job.case.name


def _done(path: Path) -> Counter[tuple[Experiment, str, str]]:
    """How many records every prompt has."""
    probes: list[Probe] = read_probes(path) if path.exists() else []
    return Counter((probe.experiment, probe.dtype, probe.prompt) for probe in probes)


def _drop_cut_line(path: Path) -> None:
    """Cut off what an interrupted run wrote last, so that the next record does not begin in its middle."""
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def _read_config(folder: Path) -> Config | None:
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    except (OSError, msgspec.DecodeError):
        return None
    return config if config.kind == KIND else None


def _page_size(server_args: Sequence[str]) -> int:
    words = list(server_args)
    return int(words[words.index("--page-size") + 1]) if "--page-size" in words else 1


def _say(message: str, *, quiet: bool) -> None:
    if not quiet:
        print(message, file=sys.stderr, flush=True)
