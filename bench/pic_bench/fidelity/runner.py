"""Runs the experiments: a server for each number format, every case in turn, a line for every record.

Owns the run's folder while it is written, what an earlier run left there, and the progress line. It must not know how a
case is made or measured, or what records say.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tqdm import tqdm

from pic_bench.environment import capture_environment
from pic_bench.fidelity.config import KIND, Config
from pic_bench.fidelity.jobs import Job, grid_jobs, shift_jobs
from pic_bench.fidelity.measure import Unrealised, measure_case
from pic_bench.fidelity.record import Experiment, Probe, read_probes, write_probes
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.fidelity.texts import TextPool, trace_texts
from pic_bench.fidelity.tokens import ModelText
from pic_bench.summary import write_json
from sglang_pic.errors import BenchError, ConfigError

__all__ = ["LeftOut", "Outcome", "claim_folder", "run_fidelity"]

PROBES = "probes.jsonl"
LEFT_OUT = "left_out.jsonl"
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
            if found != config:
                raise ConfigError(
                    f"--resume: {folder / 'config.json'} says another run than this command; repeat its arguments."
                )
            _drop_cut_line(folder / PROBES)
            return
        if not force:
            raise ConfigError(f"--out {str(folder)!r} holds an earlier run; add --resume or --force.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


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
    done = _done(folder / PROBES)
    outcome = Outcome(measured=0, resumed=0, left_out=[])
    for dtype in config.dtypes:
        todo = [job for job in jobs if done[_name(job, dtype)] < len(job.arms)]
        outcome = msgspec.structs.replace(outcome, resumed=outcome.resumed + len(jobs) - len(todo))
        if not todo:
            continue
        _say(f"{dtype}: starting the server ...", quiet=quiet)
        with serve_target(
            config.model,
            dtype=dtype,
            pool_tokens=config.pool_tokens,
            server_args=config.server_args,
            log_path=folder / f"server-{dtype}.log",
            start_timeout_s=start_timeout_s,
        ) as target:
            left_out = _measure_all(todo, target, text, config, folder, dtype, quiet=quiet)
        outcome = msgspec.structs.replace(
            outcome,
            measured=outcome.measured + len(todo) - len(left_out),
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
    # Where nobody watches, a line every half minute is enough.
    interval = 0.5 if sys.stderr.isatty() else 30.0
    total = sum(job.cost for job in jobs)
    with tqdm(
        total=total, unit="tok", unit_scale=True, desc=dtype, file=sys.stderr, disable=quiet, mininterval=interval
    ) as bar:
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


def _jobs(config: Config, pool: TextPool, text: ModelText) -> list[Job]:
    jobs: list[Job] = []
    if Experiment.GRID in config.experiments:
        jobs += grid_jobs(config.sizes, pool, text, config.seed)
    if Experiment.SHIFT in config.experiments:
        jobs += shift_jobs(config.sizes, pool, text, config.seed)
    return jobs


def _text_source(config: Config) -> tuple[str, list[str]]:
    name = config.data[0] if config.data else "sample:opendevin"
    return Path(name).name, trace_texts(name)


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
