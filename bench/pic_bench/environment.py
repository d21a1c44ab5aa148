"""environment.json and the model's facts: what a reader needs to judge or repeat a run.

Imports neither torch nor SGLang: versions are read from package metadata, hardware from the system.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from pic_traces.machine import cpu_name, git_output, gpu_names, package_version

from sglang_pic.errors import BenchError

PACKAGES = (
    *("sglang", "sglang-pic", "torch", "transformers", "triton", "locust"),
    *("fastcdc", "xxhash", "msgspec", "numpy"),
)


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine, the software and the command of a run."""

    schema_version: int = 1
    command: str
    started_at: str
    python: str
    system: str
    cpu: str
    num_cpus: int
    memory_bytes: int
    load_1min: float
    gpus: list[str]
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None
    variables: dict[str, str]


def now() -> str:
    """The time in UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def capture_environment() -> Environment:
    """Read the environment of this process and machine."""
    commit = git_output("rev-parse", "HEAD")
    return Environment(
        # As typed, with the interpreter's folder left out.
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        started_at=now(),
        python=platform.python_version(),
        system=platform.platform(),
        cpu=cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_1min=os.getloadavg()[0],
        gpus=gpu_names(),
        versions={name: found for name in PACKAGES if (found := package_version(name)) is not None},
        commit=commit,
        dirty=None if commit is None else bool(git_output("status", "--porcelain", "--untracked-files=no")),
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith("SGLANG_")},
    )


def joined(found: Sequence[tuple[str, Environment]]) -> Environment:
    """The environment of records that were measured at several times, each under a name for the error.

    Raises:
        BenchError: they are of different processors, GPUs, versions or settings of SGLang.
    """
    same = ("cpu", "gpus", "versions", "variables")
    require_equal(found, same, "a report speaks of one machine and one set of versions")
    every = [environment for _, environment in found]
    return msgspec.structs.replace(
        every[0],
        command=_each_once(environment.command for environment in every),
        started_at=min(environment.started_at for environment in every),
        load_1min=max(environment.load_1min for environment in every),
        commit=_each_once(environment.commit or "unknown" for environment in every),
        dirty=any(environment.dirty for environment in every),
    )


def require_equal(found: Sequence[tuple[str, msgspec.Struct]], fields: Iterable[str], because: str) -> None:
    """Check that structures, each under a name, have some fields in common.

    Raises:
        BenchError: naming the field, both values and where they stand.
    """
    (first_name, first), *others = found
    for field in fields:
        there = getattr(first, field)
        for name, other in others:
            if (here := getattr(other, field)) != there:
                raise BenchError(f"{field} is {there!r} in {first_name} and {here!r} in {name}; {because}.")


def _each_once(texts: Iterable[str]) -> str:
    """Texts, some of which may be lists of texts already, each once."""
    return "; ".join(dict.fromkeys(part for text in texts for part in text.split("; ")))
