"""The configuration of a fidelity run, and the files of its folder.

DIR/config.json environment.json probes.jsonl server-<dtype>.log trace-<dtype>.done vault/
DIR/summary.json report.md report.html
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from pic_replay.packed import is_written, packed

from pic_bench.fidelity.record import Probe, read_lines, whole_lines
from pic_bench.out_folder import CONFIG, ENVIRONMENT, RunKind, claim_or_continue
from sglang_pic.output import write_whole

KIND = "fidelity"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """config.json; its `kind` marks the folder. Earlier runs have fields of experiments that are gone."""

    schema_version: int = 2
    kind: str = KIND
    model: str
    data: tuple[str, ...]
    """Traces."""
    dtypes: tuple[str, ...]
    calls: int | None
    """Only the first calls of every trace."""
    policies: tuple[str, ...]
    """As on the command line."""
    min_chunk_hit: int
    """Calls with so many chunk-hit tokens under the first policy are measured."""
    pool_tokens: int
    """Of the server's KV pool."""
    server_args: tuple[str, ...]


PROBES = "probes.jsonl"
VAULT = "vault"

_RUN = RunKind(
    KIND,
    "fidelity run",
    (
        *(CONFIG, ENVIRONMENT, PROBES, f"{PROBES}.gz", VAULT, "server-*.log", "trace-*.done"),
        *("summary.json", "report.md", "report.html"),
    ),
)


def claim_run(folder: Path, config: Config, *, resume: bool, force: bool) -> None:
    """Make `folder` ready for a run: new, or an earlier run's that is continued or, with `force`, deleted.

    Raises:
        ConfigError: it holds something else, an earlier run that neither flag speaks of, or another configuration's.
    """
    probes = folder / PROBES
    if claim_or_continue(folder, _RUN, config, resume=resume, force=force) and has_records(folder):
        # The next record begins on its own line, and is not hidden by packed ones.
        write_whole(probes, whole_lines(probes))
        packed(probes).unlink(missing_ok=True)


def has_records(folder: Path) -> bool:
    """Whether a fidelity run has left records in a folder."""
    return is_written(folder / PROBES)


def read_probes(folder: Path) -> list[Probe]:
    """All records of a run; none where nothing was measured yet.

    Raises:
        BenchError: the file cannot be read, or a line of it is no record.
    """
    return read_lines(folder / PROBES, Probe)
