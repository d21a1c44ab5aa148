"""The configuration of a fidelity run, the sizes of a default and of a quick run, and the files of its folder.

DIR/config.json environment.json probes.jsonl left_out.jsonl server-<dtype>.log trace-<dtype>.done vault/
DIR/summary.json report.md report.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from pic_replay.packed import is_written, packed

from pic_bench.fidelity.record import Experiment, LeftOut, Probe, TemplateSet, read_lines, whole_lines
from pic_bench.out_folder import CONFIG, ENVIRONMENT, RunKind, claim_or_continue, read_json
from sglang_pic.core.settings import Range, check
from sglang_pic.output import write_whole

KIND = "fidelity"
Number = Annotated[int, Range(0)]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompts of `cases.tasks`, which `pic_bench.paired` serves."""

    tasks: int = 60
    """Prompts of each kind."""
    length: int = 1
    """How many times the usual documents they have."""


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured; what is said of a field is also the help of its flag. Earlier runs name sizes more."""

    edits: Annotated[Number, "Prompts of edits, from the templates in turn."] = 240
    calls: Annotated[int | None, "Only the first N calls of every trace."] = None

    def __post_init__(self) -> None:
        check(self)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """config.json; its `kind` marks the folder. Earlier runs have fields of experiments that are gone."""

    schema_version: int = 1
    kind: str = KIND
    model: str
    data: tuple[str, ...]
    """Traces; empty for what the package carries."""
    experiments: tuple[Experiment, ...]
    dtypes: tuple[str, ...]
    sizes: Amounts
    policies: tuple[str, ...]
    """Of TRACE, as on the command line; of EDITS, beside its own."""
    min_chunk_hit: int
    """TRACE measures calls with so many chunk-hit tokens under the first policy."""
    pool_tokens: int | None
    """Of the server's KV pool; None for the plan's."""
    server_args: tuple[str, ...]
    edit_set: TemplateSet = TemplateSet.REPORT
    seed: int


QUICK_SIZES = Amounts(calls=12, edits=16)


PROBES = "probes.jsonl"
LEFT_OUT = "left_out.jsonl"
VAULT = "vault"

_RUN = RunKind(
    KIND,
    "fidelity run",
    (
        *(CONFIG, ENVIRONMENT, PROBES, f"{PROBES}.gz", LEFT_OUT, VAULT, "server-*.log", "trace-*.done"),
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


def read_config(folder: Path) -> Config:
    """The configuration of a run.

    Raises:
        BenchError: the folder holds no fidelity run, or one of another version.
    """
    return read_json(folder / CONFIG, Config, "of a fidelity run that this version can read")


def has_records(folder: Path) -> bool:
    """Whether a fidelity run has left records in a folder."""
    return is_written(folder / PROBES)


def read_probes(folder: Path) -> list[Probe]:
    """All records of a run; none where nothing was measured yet.

    Raises:
        BenchError: the file cannot be read, or a line of it is no record.
    """
    return read_lines(folder / PROBES, Probe)


def read_left_out(folder: Path) -> list[LeftOut]:
    """Every prompt that was left out, once; a last line that was cut off is passed over.

    Raises:
        BenchError: the file is not a list of such prompts.
    """
    found = read_lines(folder / LEFT_OUT, LeftOut)
    return list({(one.experiment, one.dtype, one.prompt): one for one in found}.values())
