"""environment.json: the machine, the versions, the commit and the command of a run.

Imports neither torch nor SGLang: versions are read from package metadata, hardware from the system.
"""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime

import msgspec

from pic_replay.machine import cpu_name, git_output, gpu_names, package_version
from pic_replay.server import ServerInfo

_PACKAGES = (
    *("sglang", "sglang-pic", "torch", "transformers", "triton", "locust", "fastcdc", "xxhash", "msgspec", "numpy"),
    *("numba", "sglang-kernel", "flashinfer-python"),
)
_SECRET = re.compile("KEY|TOKEN|PASSWORD|SECRET|SALT")


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
    compiled_loops: bool | None = None
    """Whether numba compiles the loops of plans; None where nothing was planned in this process."""


class ReplayEnvironment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """environment.json of a replay; `seed` is that of the warm-up texts (a generated trace names its own)."""

    schema_version: int = 2
    environment: Environment
    seed: int
    server: ServerInfo


def now() -> str:
    """The time in UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def capture(command: str) -> Environment:
    """Read the environment of this process and machine.

    Args:
        command: as typed, without secrets.
    """
    commit = git_output("rev-parse", "HEAD")
    return Environment(
        command=command,
        started_at=now(),
        python=platform.python_version(),
        system=platform.platform(),
        cpu=cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_1min=os.getloadavg()[0],
        gpus=gpu_names(),
        versions={name: found for name in _PACKAGES if (found := package_version(name)) is not None},
        commit=commit,
        dirty=None if commit is None else bool(git_output("status", "--porcelain", "--untracked-files=no")),
        variables={
            k: "***" if _SECRET.search(k) else v for k, v in sorted(os.environ.items()) if k.startswith("SGLANG_")
        },
    )
