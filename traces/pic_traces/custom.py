"""`--reader MODULE:FUNCTION`: a function of the user's that reads files of a form that is not known."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pic_traces.errors import OptionError, TraceError
from pic_traces.lines import Line
from pic_traces.session import JsonValue

FileReader = Callable[[Path], Iterable[dict[str, JsonValue]]]
"""Gives the calls of a file, each as an object of a known form, such as a chat request."""

_READER: list[tuple[str, FileReader]] = []


def add_reader_argument(parser: ArgumentParser) -> None:
    """Add --reader; the verb calls `use_reader` with its value."""
    parser.add_argument(
        "--reader",
        metavar="MODULE:FUNCTION",
        help="a Python function of yours that reads each file and yields its calls as chat requests, for forms of logs "
        "that are not known (traces/pic_traces/README.md has one)",
    )


def use_reader(name: str | None) -> None:
    """Have `load` read all files by a function of the user's; None has it recognise their formats again.

    Args:
        name: `MODULE:FUNCTION`; the module is looked for in the working directory, too.

    Raises:
        OptionError: there is no such function.
    """
    _READER.clear()
    if name is None:
        return
    module, _, function = name.partition(":")
    sys.path[:] = [*sys.path, *({os.getcwd()} - {*sys.path})]
    try:
        _READER.append((name, getattr(importlib.import_module(module), function)))
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(
            f"--reader={name!r}: {error}; MODULE:FUNCTION is allowed, with MODULE.py in this folder or on PYTHONPATH"
        ) from error


def has_reader() -> bool:
    """Whether a function of the user's reads files."""
    return bool(_READER)


def read_calls(path: Path) -> Iterator[Line]:
    """What the user's function gives of a file.

    Raises:
        TraceError: the function raised, or gave something else than objects.
    """
    ((name, function),) = _READER
    number = 0
    try:
        for number, value in enumerate(function(path), start=1):
            if not isinstance(value, dict):
                raise TypeError(f"it gave {type(value).__name__}; objects with `messages` are expected")
            yield Line(path, number, f": call {number}", value)
    except Exception as error:  # whatever a function of others raises
        where = f"--reader={name!r} on {path}, behind call {number}"
        raise TraceError(f"{where}: {type(error).__name__}: {error}") from error
