"""The verb `report`: writes the reports of a comparison or of fidelity runs again and prints their tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_pic.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic report`."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="the folder that `compare`, `fidelity` or `tune` wrote with --out; several of `fidelity` are put together",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where several runs are put together: a new folder")
    parser.add_argument("--force", action="store_true", help="delete an earlier fidelity run in --out")
    parser.add_argument("--json", action="store_true", help="print summary.json instead of the table")


def run(args: argparse.Namespace) -> int:
    """Write report.md, report.html, the drawings and summary.json again, of several runs into a folder of their own.

    Returns:
        0.

    Raises:
        BenchError: the folder is neither a finished comparison nor a run of tune or fidelity with records, or several
            are not runs that go together.
        ConfigError: `--out` is missing, needless or cannot be used.
    """
    from pic_bench.compare import report as comparison
    from pic_bench.fidelity import report as fidelity
    from pic_bench.fidelity.folder import has_records, merge_runs
    from pic_bench.out_folder import holds_run, print_report
    from pic_bench.tune import report as tuned
    from pic_bench.tune.config import RUN

    folder: Path = args.folder[0]
    if len(args.folder) > 1:
        if args.out is None:
            raise ConfigError("several folders: say with --out where they are put together.")
        folder = args.out
        merge_runs(args.folder, folder, force=args.force)
    elif args.out is not None or args.force:
        raise ConfigError("--out and --force are for several folders; the report of one is written into it.")
    if holds_run(folder, RUN):
        tuned.write_report(folder)
        print_report(folder, tuned.headline, as_json=args.json)
    elif has_records(folder):
        fidelity.write_report(folder)
        print_report(folder, fidelity.headline, as_json=args.json)
    else:
        comparison.write_all(folder)
        print_report(folder, comparison.headline, as_json=args.json)
    return 0
