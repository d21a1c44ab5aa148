"""Facts about the machine that a run's figures depend on; one that cannot be read is None or "unknown"."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def package_version(name: str) -> str | None:
    """The installed version, read without importing the package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def command_output(command: list[str]) -> str | None:
    """The output of the command; None if it is missing, fails or takes longer than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_output(*args: str) -> str | None:
    """git's answer about the repository this file lies in; None outside of one."""
    return command_output(["git", "-C", str(Path(__file__).resolve().parent), *args])


def gpu_names() -> list[str]:
    """Name, driver and memory of every NVIDIA GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return (command_output(query) or "").splitlines()


def gpu_memory_mib() -> int | None:
    """MiB in use of the first GPU that this process may see, by all processes; None without nvidia-smi."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = command_output(query) or ""
    return int(used) if used.isdecimal() else None


def cpu_name() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(names, platform.processor() or "unknown")
