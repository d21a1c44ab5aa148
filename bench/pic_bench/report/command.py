"""The verb `report`: writes the reports of a comparison or of fidelity runs again and prints their tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_pic.errors import ConfigError

__all__ = ["add_arguments", "print_result", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic report`."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="the folder that `compare --out` or `fidelity --out` wrote; several of `fidelity` are put together",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where several runs are put together: a new folder")
    parser.add_argument("--force", action="store_true", help="delete an earlier fidelity run in --out")
    parser.add_argument("--json", action="store_true", help="print summary.json instead of the table")


def run(args: argparse.Namespace) -> int:
    """Write report.md, report.html and the drawings again, of several runs into a folder of their own; returns 0.

    So is summary.json: all of a fidelity run's, and of a comparison what compares its arms.

    Raises:
        BenchError: the folder is neither a finished comparison nor a fidelity run with records, or several are not
            runs that go together.
        ConfigError: `--out` is missing, needless or cannot be used.
    """
    from pic_traces.packed import is_written

    from pic_bench.fidelity.folder import PROBES

    folder = _together(args) if len(args.folder) > 1 else args.folder[0]
    if folder is not args.out and (args.out is not None or args.force):
        raise ConfigError("--out and --force are for several folders; the report of one is written into it.")
    if is_written(folder / PROBES):
        _fidelity(folder, as_json=args.json)
        return 0
    from pic_bench.out_folder import scenes_of
    from pic_bench.report.report import write_reports
    from pic_bench.report.scenes import write_scenes

    if scenes_of(folder):
        write_scenes(folder)
    else:
        write_reports(folder)
    print_result(folder, as_json=args.json)
    return 0


def print_result(folder: Path, *, as_json: bool) -> None:
    """Print summary.json, or what the report says first and where the page lies, to stdout."""
    from pic_bench.compare.run_folder import load_run, load_scenes
    from pic_bench.report.report import overview
    from pic_bench.report.scenes import closing_lines

    if as_json:
        print((folder / "summary.json").read_text("utf8"), end="")
    elif runs := load_scenes(folder):
        print(closing_lines(folder, runs))
    else:
        print(f"{overview(load_run(folder))}\nReport: {folder / 'report.html'}")


def _together(args: argparse.Namespace) -> Path:
    from pic_bench.fidelity.merge import merge_runs

    if args.out is None:
        raise ConfigError("several folders: say with --out where they are put together.")
    merge_runs(args.folder, args.out, force=args.force)
    out: Path = args.out
    return out


def _fidelity(folder: Path, *, as_json: bool) -> None:
    from pic_bench.fidelity.report import headline, write_report

    summary = write_report(folder)
    if as_json:
        print((folder / "summary.json").read_text("utf8"), end="")
        return
    print(headline(summary))
    print(f"Report: {folder / 'report.html'}")
