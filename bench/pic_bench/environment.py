"""environment.json of a folder: what a reader needs to judge or repeat a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from pic_replay.environment import Environment, capture, now

from pic_bench.out_folder import ENVIRONMENT, read_json, without_secrets

__all__ = ["Environment", "capture_environment", "now", "read_environment"]


def read_environment(folder: Path) -> Environment:
    """The machine and the versions of a run.

    Raises:
        BenchError: the file is not there or cannot be read.
    """
    return read_json(folder / ENVIRONMENT, Environment, "the environment of a run")


def capture_environment() -> Environment:
    """Read the environment of this process and machine; its command as typed, without the interpreter's folder."""
    return capture(shlex.join(without_secrets([Path(sys.argv[0]).name, *sys.argv[1:]])))
