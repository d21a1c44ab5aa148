"""The layout of a fidelity run's folder: claiming one, reading what is there, and putting several together.

DIR/config.json environment.json probes.jsonl left_out.jsonl server-<dtype>.log trace-<dtype>.done vault/
DIR/summary.json report.md report.html plot-*.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec
from pic_traces.packed import is_written, packed

from pic_bench.environment import Environment, joined, require_equal
from pic_bench.fidelity.config import KIND, Config, Sizes
from pic_bench.fidelity.record import Experiment, LeftOut, Probe, read_lines, whole_lines
from pic_bench.out_folder import (
    CONFIG,
    ENVIRONMENT,
    RunKind,
    claim_or_continue,
    read_json,
    write_json,
    write_whole,
)
from sglang_pic.errors import BenchError

T = TypeVar("T")
PROBES = "probes.jsonl"
LEFT_OUT = "left_out.jsonl"
VAULT = "vault"

_UNITED = ("data", "experiments", "dtypes", "policies", "orders")
_AMOUNTS = ("prompts", "questions", "edits", "key_prompts")
"""Of the sizes, those that say how much was measured, not what: every figure stands beside its own number."""

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


def merge_runs(folders: Sequence[Path], out: Path, *, force: bool) -> None:
    """Write a folder that `write_report` reads, and that `fidelity --resume` continues.

    A prompt and arm that two runs have counts as the later folder has it; the report says how many there are.

    Args:
        folders: two or more, in the order in which their records are written.
        out: new or empty; with `force` an earlier fidelity run, but none of `folders`.

    Raises:
        BenchError: a folder is no fidelity run, or they differ in more than what may be united.
        ConfigError: `out` cannot be used.
    """
    if any(folder.resolve() == out.resolve() for folder in folders):
        raise BenchError(f"--out {str(out)!r} is one of the runs to be put together; give another folder.")
    configs = [read_config(folder) for folder in folders]
    config = _united(folders, configs)
    environment = joined([(str(folder), read_environment(folder)) for folder in folders])
    try:
        records = [whole_lines(folder / PROBES) for folder in folders]
    except OSError as error:
        raise BenchError(f"records cannot be read: {error}.") from error
    if missing := [str(folder) for folder, lines in zip(folders, records, strict=True) if not lines]:
        raise BenchError(f"{', '.join(missing)}: no whole record; nothing was measured.")
    claim_run(out, config, resume=False, force=force)
    write_json(out / CONFIG, config)
    write_json(out / ENVIRONMENT, environment)
    write_whole(out / PROBES, b"".join(records))
    if left_out := b"".join(whole_lines(folder / LEFT_OUT) for folder in folders):
        write_whole(out / LEFT_OUT, left_out)
    for dtype in config.dtypes:
        if _traces_are_whole(folders, configs, config, dtype):
            trace_mark(out, dtype).touch()


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


def _united(folders: Sequence[Path], configs: Sequence[Config]) -> Config:
    named = list(zip(map(str, folders), configs, strict=True))
    require_equal(
        named,
        [name for name in Config.__struct_fields__ if name not in (*_UNITED, "model", "sizes")],
        "put together runs of one model and seed",
    )
    require_equal(
        [(name, config.sizes) for name, config in named],
        [name for name in Sizes.__struct_fields__ if name not in _AMOUNTS],
        "put together runs that measured the same, however much of it",
    )
    names = {Path(config.model).name for config in configs}
    if len(names) > 1:
        raise BenchError(f"the runs are of several models ({', '.join(sorted(names))}); a report speaks of one.")
    if any(Experiment.GRID in one.experiments for one in configs):
        require_equal(named, ["data"], "grid takes its text from the first file")
    united = {name: tuple(dict.fromkeys(chain(*(getattr(one, name) for one in configs)))) for name in _UNITED}
    most = {name: max(getattr(config.sizes, name) for config in configs) for name in _AMOUNTS}
    return msgspec.structs.replace(configs[0], sizes=msgspec.structs.replace(configs[0].sizes, **most), **united)


def _traces_are_whole(folders: Sequence[Path], configs: Sequence[Config], config: Config, dtype: str) -> bool:
    """Whether one of the runs measured all that the united configuration asks of the traces."""
    return any(
        trace_mark(folder, dtype).exists()
        and all(getattr(one, name) == getattr(config, name) for name in ("data", "policies", "orders", "sizes"))
        for folder, one in zip(folders, configs, strict=True)
    )
