"""The console script `sglang-pic`: finds the verb, runs it, turns errors into exit codes.

A verb is a module of its own with `add_arguments(parser)`, which may set the parser's epilog, and `run(args)`, which
returns the exit code or raises. The module is imported only when the user names its verb, so that `sglang-pic --help`
needs neither torch nor SGLang.
Exit codes: 0 ok, 1 tried and failed, or what was checked fails, 2 something given or needed cannot be used, 130
interrupted. `_exit_code` decides which errors are which; the help of a verb explains its own.
"""

from __future__ import annotations

import argparse
import errno
import os
import select
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import cast

import msgspec
from pic_traces.errors import ReplayError, TraceError
from pic_traces.printable import printable_output

from sglang_pic import __version__
from sglang_pic.arguments import Parser
from sglang_pic.errors import ConfigError, PicError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

EXTRAS = {
    "census": ("jinja2", "rich", "tokenizers"),
    "client": ("httpx",),
    "completion": ("shtab",),
}
"""The extras of this package and the modules that they install; other modules come with SGLang."""
# Fixed, so that help text is the same in every terminal and in the README.
HELP_WIDTH = 100
_DISK_FAILS = {errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}
_BAD_PATH = {errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.EPERM, errno.EROFS}
"""Errors of a disk, a name or permissions, which the user can mend: they are no bug."""
_PLACES = ("DIR", "FILE", "LOGS", "MODEL", "PAGE", "TRACE", "TRACE|RUN")
"""Of arguments whose values a shell completes as names of files."""
_FORMATTER = cast("type[argparse.HelpFormatter]", partial(argparse.RawDescriptionHelpFormatter, width=HELP_WIDTH))


class Verb(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job of the console script; `verbs.toml` lists them.

    Args:
        module: does the job.
        exits: what its exit codes mean, beyond those of every verb (`exits_of`).
        needs: modules that `run` imports whatever its arguments are, beyond the package's own dependencies.
        extras: the extras that install them.
    """

    module: str
    help: str
    description: str
    examples: tuple[str, ...]
    exits: dict[int, str] = msgspec.field(default_factory=dict)
    needs: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


_EXITS = {
    EXIT_FAILED: "it was tried and failed; one line on stderr says why",
    EXIT_USAGE: "an argument, a file, a log or a setting cannot be used, or a package is missing",
    EXIT_INTERRUPTED: "interrupted",
}
VERBS = msgspec.toml.decode(Path(__file__).with_name("verbs.toml").read_bytes(), type=dict[str, Verb])


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Args:
        argv: the arguments after the program's name; those of the process if None.

    Returns:
        The exit code.

    Raises:
        SystemExit: from argparse, for `--help`, `--version` (0) and a usage error (2).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        print("sglang-pic: error: stdout is closed", file=sys.stderr)
        return EXIT_FAILED
    try:
        try:
            return _run(words)
        finally:
            # Here, where a closed pipe can still be answered; `--help` leaves by SystemExit.
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("sglang-pic: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (PicError, TraceError) as error:
        print(f"sglang-pic: error: {error}", file=sys.stderr)
        return _exit_code(error)
    except BrokenPipeError:
        # A socket breaks with the same exception, and that one is a bug worth its traceback.
        if not _stdout_has_no_reader():
            raise
        _silence_stdout()
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in _DISK_FAILS | _BAD_PATH:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"sglang-pic: error: {where}{error.strerror}", file=sys.stderr)
        # What stdout still holds cannot be written at exit either.
        _silence_stdout()
        return _exit_code(error)


def _exit_code(error: Exception) -> int:
    """2 if something that it was given or needs cannot be used: words, paths, logs, packages; 1 if the work failed."""
    if isinstance(error, OSError):
        is_bad_input = error.errno in _BAD_PATH
    else:
        is_bad_input = isinstance(error, ConfigError | TraceError) and not isinstance(error, ReplayError)
    return EXIT_USAGE if is_bad_input else EXIT_FAILED


def exits_of(verb: Verb) -> dict[int, str]:
    """The exit codes of a verb in ascending order, each with its meaning."""
    return dict(sorted({**_EXITS, **verb.exits}.items()))


def _run(words: list[str]) -> int:
    parser, verb_parsers = _build_parser()
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    name = words[0]
    if name not in VERBS:
        parser.parse_args(words)  # leaves by SystemExit: --help, --version or a usage error
        raise AssertionError(f"argparse let {words!r} pass")
    module, verb_parser = _load(name), verb_parsers[name]
    _describe(verb_parser, VERBS[name], module)
    args = verb_parser.parse_args(words[1:], argparse.Namespace(verb=name))
    if "-" in (str(getattr(args, "out", "")), str(getattr(args, "target", ""))):
        verb_parser.error("'-': name a file, or a folder for a run.")
    _check_needs(name, VERBS[name].needs, VERBS[name].extras)
    return int(module.run(args))


def _load(name: str) -> ModuleType:
    try:
        return import_module(VERBS[name].module)
    except ModuleNotFoundError as error:
        if error.name == VERBS[name].module.partition(".")[0]:
            raise ConfigError(
                f"`sglang-pic {name}` is in sglang-pic-bench: pip install ./bench in the repository"
            ) from error
        if error.name is None or error.name.startswith(("sglang_pic", "pic_")):
            raise
        raise ConfigError(f"`sglang-pic {name}` needs the package {error.name!r}, which is not installed.") from error


def _check_needs(name: str, needs: Sequence[str], extras: Sequence[str]) -> None:
    """Refuses a verb or an option before it begins where a module is missing, and says how to install it."""
    missing = {module for module in needs if find_spec(module) is None}
    if not missing:
        return
    extras = [extra for extra in extras if missing.intersection(EXTRAS[extra])]
    ways = ["install SGLang first"] if missing.difference(*EXTRAS.values()) else []
    ways += [f"pip install '.[{','.join(extras)}]' in the repository"] if extras else []
    raise ConfigError(
        f"`sglang-pic {name}` needs {', '.join(sorted(missing))}, not installed here: {', then '.join(ways)}"
    )


class _Completion(argparse.Action):
    """Prints a shell's completion of all verbs that are installed here, and leaves."""

    def __call__(self, parser: argparse.ArgumentParser, _space: object, shell: object, _option: object = None) -> None:
        _check_needs("--completion", EXTRAS["completion"], ("completion",))
        import shtab

        whole, verb_parsers = _build_parser()
        for name, verb in VERBS.items():
            # A verb of the other distribution, which is not installed here, stays a name.
            with suppress(PicError):
                _describe(verb_parsers[name], verb, _load(name))
            for action in verb_parsers[name]._actions:
                if action.metavar in _PLACES:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(whole, str(shell)))
        parser.exit()


def _describe(parser: argparse.ArgumentParser, verb: Verb, module: ModuleType) -> None:
    module.add_arguments(parser)
    parser.formatter_class = _FORMATTER
    exits = "\n".join(["exit codes:", *(f"  {code:<4} {meaning}" for code, meaning in exits_of(verb).items())])
    parser.epilog = "\n\n".join(part for part in (parser.epilog, exits, _examples(verb.examples)) if part)


def _build_parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="sglang-pic",
        description="Position-independent KV-cache reuse for SGLang: try it, measure it, and ask your own logs.",
        epilog=_examples([verb.examples[0] for verb in VERBS.values()])
        + "\n\n`sglang-pic VERB --help` explains a verb. To start a server with the cache, use SGLang's own command:\n"
        "  sglang serve MODEL --radix-cache-backend pic",
        formatter_class=_FORMATTER,
    )
    parser.add_argument("--version", action="version", version=f"sglang-pic {__version__}")
    shells = ("bash", "zsh", "tcsh")
    parser.add_argument(
        "--completion", action=_Completion, choices=shells, help="print the completion of this command for a shell"
    )
    group = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb")
    subparsers = {
        name: group.add_parser(
            name,
            help=verb.help,
            description=textwrap.fill(verb.description, HELP_WIDTH - 2),
            formatter_class=_FORMATTER,
        )
        for name, verb in VERBS.items()
    }
    return parser, subparsers


def _examples(lines: Sequence[str]) -> str:
    return "\n".join(["examples:" if len(lines) > 1 else "example:", *(f"  {line}" for line in lines)])


def _stdout_has_no_reader() -> bool:
    """Whether stdout is a pipe whose other end is closed, as `sglang-pic ... | head` leaves it."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _silence_stdout() -> None:
    """Lets the interpreter's own flush at exit go nowhere instead of failing."""
    try:
        sys.stdout.flush()
        return
    except (OSError, ValueError):
        pass
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
