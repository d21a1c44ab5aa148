"""Owns the layout of a fidelity run's folder: what lies where, claiming it for a run, what an earlier run left there.

It must not know how anything is measured or shown.

    DIR/config.json environment.json probes.jsonl left_out.jsonl server-<dtype>.log trace-<dtype>.done vault/
    DIR/summary.json report.md report.html plot-*.svg
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from pic_traces.packed import is_written, packed

from pic_bench.environment import Environment
from pic_bench.fidelity.config import KIND, Config
from pic_bench.fidelity.record import Experiment, whole_lines
from pic_bench.out_folder import CONFIG, RunKind, claim_folder, holds_run
from sglang_pic.errors import BenchError, ConfigError

__all__ = [
    "ENVIRONMENT",
    "LEFT_OUT",
    "PROBES",
    "VAULT",
    "LeftOut",
    "claim_run",
    "read_config",
    "read_environment",
    "read_left_out",
    "server_log",
    "trace_mark",
]

PROBES = "probes.jsonl"
LEFT_OUT = "left_out.jsonl"
ENVIRONMENT = "environment.json"
VAULT = "vault"

_RUN = RunKind(
    KIND,
    "fidelity run",
    (
        *(CONFIG, ENVIRONMENT, PROBES, f"{PROBES}.gz", LEFT_OUT, VAULT, "server-*.log", "trace-*.done"),
        *("summary.json", "report.md", "report.html", "plot-*.svg"),
    ),
)


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt that was not served as meant, and so is in no record; a line of `left_out.jsonl`."""

    schema_version: int = 1
    experiment: Experiment
    dtype: str
    prompt: str
    reason: str


def claim_run(folder: Path, config: Config, *, resume: bool, force: bool) -> None:
    """Make `folder` ready for a run: new, or an earlier run's that is continued or, with `force`, deleted.

    Raises:
        ConfigError: it holds something else, an earlier run that neither flag speaks of, or another configuration's.
    """
    if not (resume and holds_run(folder, _RUN)):
        claim_folder(folder, _RUN, force=force, flags="--resume or --force")
        return
    if differing := _differing(read_config(folder), config):
        raise ConfigError(
            f"--resume: {folder / CONFIG} says another run than this command: {'; '.join(differing)}. Repeat its "
            "arguments, or give a new folder."
        )
    _make_appendable(folder / PROBES)


def read_config(folder: Path) -> Config:
    """What a run was asked for.

    Raises:
        BenchError: the folder holds no fidelity run, or one of another version.
    """
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=Config)
    except (OSError, msgspec.DecodeError, ConfigError) as error:
        raise BenchError(f"{folder}: no fidelity run that this version can read ({error}).") from error


def read_environment(folder: Path) -> Environment:
    """What a run was made on.

    Raises:
        BenchError: the file is not there or cannot be read.
    """
    path = folder / ENVIRONMENT
    try:
        return msgspec.json.decode(path.read_bytes(), type=Environment)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path}: not the environment of a run ({error}).") from error


def read_left_out(folder: Path) -> list[LeftOut]:
    """Every prompt that was left out, once; a last line that was cut off is passed over.

    Raises:
        BenchError: the file is not a list of such prompts.
    """
    path = folder / LEFT_OUT
    decoder = msgspec.json.Decoder(LeftOut)
    try:
        found = [decoder.decode(line) for line in whole_lines(path).split(b"\n") if line]
    except msgspec.DecodeError as error:
        raise BenchError(f"{path}: not a list of prompts that were left out ({error}).") from error
    return list({(one.experiment, one.dtype, one.prompt): one for one in found}.values())


def trace_mark(folder: Path, dtype: str) -> Path:
    """A file that says that the traces were measured to their end."""
    return folder / f"trace-{dtype}.done"


def server_log(folder: Path, dtype: str) -> Path:
    """What the server of a number format says."""
    return folder / f"server-{dtype}.log"


def _differing(found: Config, wanted: Config) -> list[str]:
    """What an earlier run's configuration says otherwise."""
    there, here = (msgspec.to_builtins(config) for config in (found, wanted))
    return [f"{name} is {there[name]!r} there and {here[name]!r} here" for name in there if there[name] != here[name]]


def _make_appendable(path: Path) -> None:
    """Unpack the records and cut off what an interrupted run wrote last: the next record begins on its own line."""
    if is_written(path):
        path.write_bytes(whole_lines(path))
        packed(path).unlink(missing_ok=True)
