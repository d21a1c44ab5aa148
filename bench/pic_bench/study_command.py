"""The command line of this package's studies: arguments, timing, and the file of the result.

A module declares a `Study` with its arguments and decorates the function that measures; the module has only the
measurement, the structs of its result and its table. Imports nothing that a machine with torch and Triton alone lacks.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
from pic_traces.errors import TraceError
from pic_traces.printable import printable_output

from pic_bench.environment import Environment, capture_environment
from pic_bench.out_folder import write_json
from pic_bench.report.markdown import Table, markdown_table
from sglang_pic.errors import PicError

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")
P = ParamSpec("P")
Number = TypeVar("Number", int, float)
OPTIONS = Path(__file__).with_name("options.toml")
"""Of the options that several commands have."""
_TYPES = {"int": int, "float": float, "path": Path}


class Finding(NamedTuple):
    """The result of a study."""

    result: msgspec.Struct | None
    """For `--out` and `--json`."""
    shown: Table | str
    """For stdout."""
    exit_code: int = 0


class Study:
    """The command `python -m pic_bench.NAME`.

    Args:
        doc: the module's docstring, which `--help` shows.
        seed: the default of `--seed`; None for a study that draws nothing.
        has_out: whether the frame offers `--out FILE` and `--json`, and writes and prints the result.
    """

    def __init__(self, name: str, doc: str | None, *, seed: int | None = None, has_out: bool = True) -> None:
        self.name = name
        prog = f"python -m pic_bench.{name}"
        self.parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=_HelpFormat)
        self.add = self.parser.add_argument
        if seed is not None:
            self.add("--seed", type=int, default=seed, metavar="N", help="of all that is drawn")
        if has_out:
            self.add("--out", type=Path, metavar="FILE", help="write the result with its environment as JSON there")
            self.add("--json", action="store_true", help="print the result as JSON instead of the table")

    def options(self, *names: str, **defaults: object) -> None:
        """Add some of the options that several commands have, with defaults of this study."""
        add_options(self.parser, OPTIONS, *names)
        self.parser.set_defaults(**defaults)

    def find(self, *words: str) -> Finding:
        """What the study finds with these arguments, for a study that writes no logs; what it raises is raised."""
        return self._body(self.parser.parse_args(words), Path())

    def measures(self, body: Callable[[argparse.Namespace, Path], Finding]) -> Callable[..., int]:
        """Make the function that measures a `main(argv)`.

        The function gets the arguments and a folder for logs, which is removed afterwards. `main` returns the exit
        code: the finding's, 1 for an error, which is told in one line on stderr, 130 for Ctrl-C or SIGTERM.
        """
        self._body = body

        @printable_output()
        @wraps(body)
        def main(argv: Sequence[str] | None = None) -> int:
            args = self.parser.parse_args(argv)
            try:
                with interrupt_on_sigterm(), tempfile.TemporaryDirectory() as logs:
                    return _finish(args, body(args, Path(logs)))
            except (PicError, TraceError) as error:
                print(f"{self.name}: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print("interrupted; servers stopped", file=sys.stderr)
                return 130

        return main


def add_options(parser: argparse.ArgumentParser, path: Path, *names: str) -> None:
    """Add the options of a TOML file, all or those named: under each what `add_argument` takes.

    A type stands there by its name; `least` in its place is that of a number, `at_least` so much.
    """
    options = tomllib.loads(path.read_text("utf8"))
    for name, said in ((name, options[name]) for name in names or options):
        if "type" in said:
            said["type"] = _TYPES[said["type"]]
        elif "least" in said:
            said["type"] = at_least(said.pop("least"))
        parser.add_argument(f"--{name}", **said)


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind like Ctrl-C in the body, so that it leaves no servers behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that a study writes with `--out`."""

    schema_version: int = 1
    environment: Environment


R = TypeVar("R", bound=Result)


def result_of(kind: type[R], args: argparse.Namespace, **found: object) -> R:
    """A result: the environment, the arguments of which it has a field of that name, and what was found."""
    fields = {field.name for field in msgspec.structs.fields(kind)}
    asked = {name: value for name, value in vars(args).items() if name in fields}
    return kind(**{"environment": capture_environment(), **asked, **found})


def keep(args: argparse.Namespace, result: msgspec.Struct) -> None:
    """Write a result, or its part so far, into the file of `--out`."""
    if getattr(args, "out", None) is not None:
        write_json(args.out, result)


def progress(*, quiet: bool, **options: Any) -> tqdm[Any]:
    """A bar on stderr; where nobody watches, a line every half minute is enough. `options` are tqdm's."""
    from tqdm import tqdm

    return tqdm(**options, disable=quiet, mininterval=0.5 if sys.stderr.isatty() else 30.0, file=sys.stderr)


def at_least(least: Number) -> Callable[[str], Number]:
    """The type of a number of `least` or more, for `add`: whole where `least` is."""
    kind = type(least)

    def read(text: str) -> Number:
        if (number := kind(text)) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be {least} or more")
        return number

    read.__name__ = kind.__name__
    return read


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[float, T]:
    """Seconds that a call took, and its result."""
    start = time.perf_counter()
    result = call(*args, **kwargs)
    return time.perf_counter() - start, result


def ms(seconds: Sequence[float], percentile: float = 50) -> float:
    """A percentile in milliseconds."""
    return float(np.percentile(seconds, percentile)) * 1e3


def _finish(args: argparse.Namespace, found: Finding) -> int:
    if found.result is not None:
        keep(args, found.result)
    if found.result is not None and getattr(args, "json", False):
        print(msgspec.json.format(msgspec.json.encode(found.result), indent=2).decode())
    else:
        print(markdown_table(found.shown) if isinstance(found.shown, Table) else found.shown)
    return found.exit_code


class _HelpFormat(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it is written; a default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_plain = action.default in (None, []) or action.default is False or "default" in (action.help or "")
        return action.help if is_plain else super()._get_help_string(action)
