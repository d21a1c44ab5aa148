"""`environment.json` of a replay: machine, versions, commit, command."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

import msgspec

from pic_replay.machine import cpu_name, git_output, gpu_names, package_version
from pic_replay.server import ServerInfo

_PACKAGES = ("sglang-pic", "sglang", "torch", "transformers", "triton", "locust", "gevent", "msgspec", "numpy")


class RunEnvironment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where, when and with what a replay ran; `seed` is that of the warm-up texts (a generated trace names its own)."""

    schema_version: int = 1
    started_at: str
    command: list[str]
    python: str
    platform: str
    cpu: str
    num_cpus: int
    memory_bytes: int
    gpus: list[str]
    packages: dict[str, str]
    commit: str | None
    dirty: bool | None
    seed: int
    server: ServerInfo


def describe_environment(server: ServerInfo, *, command: list[str], seed: int) -> RunEnvironment:
    """Collect the facts; what cannot be found out is None, empty or "unknown"."""
    commit = git_output("rev-parse", "HEAD")
    status = git_output("status", "--porcelain") if commit else None
    return RunEnvironment(
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        command=command,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=gpu_names(),
        packages={name: found for name in _PACKAGES if (found := package_version(name)) is not None},
        commit=commit,
        dirty=None if status is None else bool(status),
        seed=seed,
        server=server,
    )
