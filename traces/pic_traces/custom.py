"""`--reader MODULE:FUNCTION`: a function of the user's that reads files of a form that is not known."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pic_traces.errors import OptionError, TraceError
from pic_traces.lines import Line, is_json
from pic_traces.session import JsonValue

FileReader = Callable[[Path], Iterable[dict[str, JsonValue]]]
"""Gives the calls of a file, each as an object of a known form, such as a chat request."""


class CustomReader(NamedTuple):
    """The function, and its name for messages."""

    name: str
    function: FileReader

    def calls(self, path: Path) -> Iterator[Line]:
        """What the function gives of a file.

        Raises:
            TraceError: the function raised, or gave something else than objects.
        """
        number = 0
        try:
            for number, value in enumerate(self.function(path), start=1):
                if not isinstance(value, dict):
                    raise TypeError(f"it gave {type(value).__name__}; objects with `messages` are expected")
                text = "" if is_json(value) else f"{value}"
                yield Line(path, number, f": call {number}", {} if text else value, text)
        except Exception as error:  # whatever a function of others raises
            where = f"--reader={self.name!r} on {path}, behind call {number}"
            raise TraceError(f"{where}: {type(error).__name__}: {error}") from error


def add_reader_argument(parser: ArgumentParser) -> None:
    """Add --reader; `custom_reader` finds its function."""
    parser.add_argument(
        "--reader",
        metavar="MODULE:FUNCTION",
        help="a Python function of yours that reads each file and yields its calls as chat requests, for forms of logs "
        "that are not known (traces/pic_traces/README.md has one)",
    )


def custom_reader(name: str | None) -> CustomReader | None:
    """The user's function of a name, for `load`; None without a name.

    Args:
        name: `MODULE:FUNCTION`; the module is looked for in the working directory, too.

    Raises:
        OptionError: there is no such function.
    """
    if name is None:
        return None
    module, _, function = name.partition(":")
    sys.path[:] = [*sys.path, *({os.getcwd()} - {*sys.path})]
    try:
        return CustomReader(name, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(
            f"--reader={name!r}: {error}; MODULE:FUNCTION is allowed, with MODULE.py in this folder or on PYTHONPATH"
        ) from error
