"""Puts the records of fidelity runs that were measured side by side into one folder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec

from pic_bench.environment import joined, require_equal
from pic_bench.fidelity.config import Config, Sizes
from pic_bench.fidelity.folder import LEFT_OUT, PROBES, claim_run, read_config, read_environment, trace_mark
from pic_bench.fidelity.record import Experiment, whole_lines
from pic_bench.out_folder import CONFIG, ENVIRONMENT, write_json, write_whole
from sglang_pic.errors import BenchError

_UNITED = ("data", "experiments", "dtypes", "policies", "orders")
_AMOUNTS = ("prompts", "shift_prompts", "questions", "edits", "compositions", "greedy_prompts", "key_prompts")
"""Of the sizes, those that say how much was measured, not what: every figure stands beside its own number."""


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
    if any({Experiment.GRID, Experiment.SHIFT, Experiment.COMPOSE} & {*one.experiments} for one in configs):
        require_equal(named, ["data"], "grid, shift and compose take their text from the first file")
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
