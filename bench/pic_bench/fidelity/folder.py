"""The layout of a fidelity run's folder: claiming one, and reading what is there.

DIR/config.json environment.json probes.jsonl left_out.jsonl server-<dtype>.log trace-<dtype>.done vault/
DIR/summary.json report.md report.html plot-*.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from pic_traces.packed import is_written, packed

from pic_bench.environment import Environment
from pic_bench.fidelity.config import KIND, Config
from pic_bench.fidelity.record import LeftOut, Probe, read_lines, whole_lines
from pic_bench.out_folder import CONFIG, ENVIRONMENT, RunKind, claim_or_continue, read_json, write_whole
from sglang_pic.errors import BenchError

T = TypeVar("T")
PROBES = "probes.jsonl"
LEFT_OUT = "left_out.jsonl"
VAULT = "vault"

_RUN = RunKind(
    KIND,
    "fidelity run",
    (
        *(CONFIG, ENVIRONMENT, PROBES, f"{PROBES}.gz", LEFT_OUT, VAULT, "server-*.log", "trace-*.done"),
        *("summary.json", "report.md", "report.html", "plot-*.svg"),
    ),
)


def claim_run(folder: Path, config: Config, *, resume: bool, force: bool) -> None:
    """Make `folder` ready for a run: new, or an earlier run's that is continued or, with `force`, deleted.

    Raises:
        ConfigError: it holds something else, an earlier run that neither flag speaks of, or another configuration's.
    """
    if not claim_or_continue(folder, _RUN, config, resume=resume, force=force):
        return
    # The next record begins on its own line, and is not hidden by packed ones.
    probes = folder / PROBES
    if has_records(folder):
        write_whole(probes, whole_lines(probes))
        packed(probes).unlink(missing_ok=True)


def read_config(folder: Path) -> Config:
    """What a run was asked for.

    Raises:
        BenchError: the folder holds no fidelity run, or one of another version.
    """
    return read_json(folder / CONFIG, Config, "of a fidelity run that this version can read")


def read_environment(folder: Path) -> Environment:
    """What a run was made on.

    Raises:
        BenchError: the file is not there or cannot be read.
    """
    return read_json(folder / ENVIRONMENT, Environment, "the environment of a run")


def has_records(folder: Path) -> bool:
    """Whether a fidelity run has left records in a folder."""
    return is_written(folder / PROBES)


def read_probes(folder: Path) -> list[Probe]:
    """All records of a run; none where nothing was measured yet.

    Raises:
        BenchError: the file cannot be read, or a line of it is no record.
    """
    return _read_records(folder / PROBES, Probe, "no records of a fidelity run")


def read_left_out(folder: Path) -> list[LeftOut]:
    """Every prompt that was left out, once; a last line that was cut off is passed over.

    Raises:
        BenchError: the file is not a list of such prompts.
    """
    found = _read_records(folder / LEFT_OUT, LeftOut, "not a list of prompts that were left out")
    return list({(one.experiment, one.dtype, one.prompt): one for one in found}.values())


def trace_mark(folder: Path, dtype: str) -> Path:
    """A file that says that the traces were measured to their end."""
    return folder / f"trace-{dtype}.done"


def _read_records(path: Path, kind: type[T], word: str) -> list[T]:
    try:
        return read_lines(path, kind)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path}: {word} ({error}).") from error
