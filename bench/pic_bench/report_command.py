"""Owns the verb `report`: writes the reports of a comparison or a fidelity run again and prints its table.

It must not measure anything; errors go up to the console script, which knows the exit statuses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "print_result", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic report`."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder that `compare --out` or `fidelity --out` wrote"
    )
    parser.add_argument("--json", action="store_true", help="print summary.json instead of the table")


def run(args: argparse.Namespace) -> int:
    """Write report.md, report.html and the drawings again; returns 0.

    A fidelity run's summary.json is made again too, from its raw records.

    Raises:
        BenchError: the folder is neither a finished comparison nor a fidelity run with records.
    """
    from pic_bench.fidelity.report import PROBES

    if (args.folder / PROBES).exists():
        _fidelity(args.folder, as_json=args.json)
        return 0
    from pic_bench.report import write_reports

    write_reports(args.folder)
    print_result(args.folder, as_json=args.json)
    return 0


def print_result(folder: Path, *, as_json: bool) -> None:
    """Print summary.json, or the report's tables and where the page lies, to stdout."""
    from pic_bench.markdown import overview
    from pic_bench.run_folder import load_run

    if as_json:
        print((folder / "summary.json").read_text("utf8"), end="")
        return
    print(overview(load_run(folder)))
    print(f"Report: {folder / 'report.html'}")


def _fidelity(folder: Path, *, as_json: bool) -> None:
    from pic_bench.fidelity.report import headline, write_report

    summary = write_report(folder)
    if as_json:
        print((folder / "summary.json").read_text("utf8"), end="")
        return
    print(headline(summary))
    print(f"Report: {folder / 'report.html'}")
