"""The verb `report`: writes the report of a comparison or of a run of fidelity or tune again and prints its table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from sglang_pic.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic report`."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder that `compare`, `fidelity` or `tune` wrote with --out"
    )
    parser.add_argument("--json", action="store_true", help="print summary.json instead of the table")


def run(args: argparse.Namespace) -> int:
    """Write report.md, report.html and summary.json again.

    Returns:
        0.

    Raises:
        ConfigError: there is no such folder, or it is neither a comparison nor a run of tune or fidelity with records.
        BenchError: a record of the run cannot be read.
    """
    from pic_bench.compare import report as comparison
    from pic_bench.compare.run_folder import COMPARISON
    from pic_bench.fidelity import report as fidelity
    from pic_bench.fidelity.config import has_records
    from pic_bench.out_folder import holds_run, print_report
    from pic_bench.tune import report as tuned
    from pic_bench.tune.config import RUN

    folder: Path = args.folder
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r}: no such folder; give one that `compare`, `fidelity` or `tune` wrote.")
    write: Callable[[Path], object] = comparison.write_all
    headline = comparison.headline
    if holds_run(folder, RUN):
        write, headline = tuned.write_report, tuned.headline
    elif has_records(folder):
        write, headline = fidelity.write_report, fidelity.headline
    elif not holds_run(folder, COMPARISON):
        raise ConfigError(f"{str(folder)!r}: no run in it; give a folder that `compare`, `fidelity` or `tune` wrote.")
    write(folder)
    print_report(folder, headline, as_json=args.json)
    return 0
