"""The arguments of `census` and `explain` that name recorded calls, their checks, and a progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import get_args

from pic_traces import Session, load
from pic_traces.clock import split_clock
from pic_traces.custom import CustomReader, add_reader_argument, custom_reader
from pic_traces.logs import Passed
from pic_traces.source import TRACE_HELP, log_files
from tqdm import tqdm

from sglang_pic.census.outcome import Outcome
from sglang_pic.core import CoreConfig, ReusePolicy, with_preset
from sglang_pic.errors import ConfigError
from sglang_pic.output import output_path
from sglang_pic.settings import settings_of


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add FILE, --reader, --tokenizer, --strict, --limit-sessions and --quiet."""
    parser.add_argument("files", nargs="+", metavar="FILE", help=TRACE_HELP)
    add_reader_argument(parser)
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="a model's folder, or its name on the hub if it is in Hugging Face's cache, for its tokenizer and chat "
        "template (default: count words, which is approximate)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse lines of no known format (default: pass them over, and count them)",
    )
    parser.add_argument("--limit-sessions", type=int, metavar="N", help="read only the first N sessions of every file")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an argument for every setting of the server's reuse policy."""
    group = parser.add_argument_group(
        "settings of the server", "named as in its configuration; set one to see what it would change"
    )
    for name, setting in settings_of(ReusePolicy).items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{setting.description} Default: {setting.default}."
        if choices := get_args(setting.kind):
            group.add_argument(flag, dest=name, choices=choices, help=text)
        else:
            group.add_argument(flag, dest=name, type=int, metavar="N", help=text)


def policy_of(args: argparse.Namespace, **changed: str) -> CoreConfig:
    """The server's settings from the arguments, or from `changed`.

    Raises:
        ConfigError: a value is not allowed.
    """
    asked = {name: value for name in settings_of(ReusePolicy) if (value := getattr(args, name)) is not None}
    return CoreConfig(**with_preset({**asked, **changed}))


def check_inputs(args: argparse.Namespace) -> CustomReader | None:
    """Check the arguments, and return what --reader names.

    Raises:
        ConfigError: a limit is not positive, or a log is named twice.
        OptionError: --reader names no function.
    """
    for name in ("limit_sessions", "limit_calls"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={value!r}: must be 1 or more; leave it out to read all.")
    reader = custom_reader(args.reader)
    check_named_once(args.files, reader)
    return reader


def check_named_once(files: Sequence[str], reader: CustomReader | None = None) -> None:
    """Check that no log is read twice, by its own name and by that of a folder.

    Raises:
        ConfigError: one is.
    """
    seen = set[tuple[str, int, Path]]()
    for file in files:
        clock, seed, rest = split_clock(file)
        path = Path(rest).expanduser()
        paths = log_files(path, has_reader=reader is not None) if path.is_dir() else [path]
        found = {(clock[:5], seed, one.resolve()) for one in paths}
        if twice := seen & found:
            name = file if len(paths) == 1 else f"{min(twice)[2]}"
            raise ConfigError(f"{name!r}: is named twice; name it once, or all of it would count as prefix hits.")
        seen |= found


def output_of(args: argparse.Namespace, what: str) -> Path:
    """The path of `--out`, which is neither an input nor a log in the folder of one; `what` names it in messages.

    Raises:
        ConfigError: it is, or `output_path` refuses it.
    """
    path = output_path(args.out, what, is_forced=args.force)
    for file in args.files:
        source = Path(split_clock(file)[2]).expanduser()
        if not (path.exists() and source.exists()):
            continue
        if path.samefile(source) or (source.resolve() in path.resolve().parents and path.suffix != ".html"):
            raise ConfigError(f"--out={args.out!r}: would replace a log that is read, {file!r}; name another file.")
    return path


def read_sessions(
    file: str, limit: int | None, passed: Passed | None = None, reader: CustomReader | None = None
) -> Iterator[Session]:
    """The first `limit` sessions of a file, or all if None; `passed` collects the skipped lines."""
    return islice(load(file, passed or Passed(is_checked=False), reader), limit)


def with_progress(outcomes: Iterable[Outcome], num_calls: int, *, quiet: bool) -> Iterator[Outcome]:
    """The outcomes, with a progress bar on stderr if that is a terminal."""
    is_hidden = quiet or not sys.stderr.isatty()
    bar = tqdm(outcomes, total=num_calls, unit="call", file=sys.stderr, disable=is_hidden, dynamic_ncols=True)
    for outcome in bar:
        bar.set_description_str(outcome.ref.file.rpartition("/")[2][-40:], refresh=False)
        yield outcome
