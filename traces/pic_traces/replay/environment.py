"""What a run's figures depend on: machine, versions, commit, command.

Owns `environment.json`. Reads only; must not import the packages whose versions it states.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from pic_traces.replay.server import ServerInfo

__all__ = ["RunEnvironment", "describe_environment"]

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
    commit = _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"])
    status = _output(["git", "-C", str(Path(__file__).parent), "status", "--porcelain"]) if commit else None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return RunEnvironment(
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        command=command,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpus=(_output(query) or "").splitlines(),
        packages={name: found for name in _PACKAGES if (found := _version(name)) is not None},
        commit=commit,
        dirty=None if status is None else bool(status),
        seed=seed,
        server=server,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
