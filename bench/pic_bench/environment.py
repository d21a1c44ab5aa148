"""environment.json of a folder: what a reader needs to judge or repeat a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import msgspec
from pic_replay.environment import Environment, capture, now

from pic_bench.out_folder import ENVIRONMENT, read_json, without_secrets
from sglang_pic.errors import BenchError

__all__ = ["Environment", "capture_environment", "joined_environment", "now", "read_environment"]


def read_environment(folder: Path) -> Environment:
    """The machine and the versions of a run.

    Raises:
        BenchError: the file is not there or cannot be read.
    """
    return read_json(folder / ENVIRONMENT, Environment, "the environment of a run")


def capture_environment() -> Environment:
    """Read the environment of this process and machine; its command as typed, without the interpreter's folder."""
    return capture(shlex.join(without_secrets([Path(sys.argv[0]).name, *sys.argv[1:]])))


def joined_environment(folder: Path) -> Environment:
    """Of this run, and of those that it continues.

    Raises:
        BenchError: those were made on another machine or by other versions.
    """
    here = capture_environment()
    if not (folder / ENVIRONMENT).exists():
        return here
    before = read_environment(folder)
    for field in ("cpu", "gpus", "versions", "variables"):
        if (there := getattr(before, field)) != (now := getattr(here, field)):
            raise BenchError(
                f"{field} is {there!r} in {folder} and {now!r} in this run; a report speaks of one machine and one set "
                "of versions."
            )
    return msgspec.structs.replace(
        before,
        command=_each_once(before.command, here.command),
        load_1min=max(before.load_1min, here.load_1min),
        commit=_each_once(before.commit or "unknown", here.commit or "unknown"),
        dirty=before.dirty or here.dirty,
    )


def _each_once(texts: str, text: str) -> str:
    """A list of texts with one more, unless it is there."""
    return "; ".join(dict.fromkeys([*texts.split("; "), text]))
