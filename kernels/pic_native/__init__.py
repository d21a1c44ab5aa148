"""C files of this project, compiled for this very CPU at first use and kept where Python keeps compiled files.

Knows the standard library only. A machine that runs Triton has what it takes: a C compiler and Python's headers.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["BuildError", "load_module"]

logger = logging.getLogger(__name__)

_COMPILE: Final = ("-O3", "-march=native", "-fPIC", "-c")
_TIMEOUT_S: Final = 60


class BuildError(Exception):
    """A C file cannot be compiled or loaded here; the message is one line."""


def load_module(name: str, source: Path) -> ModuleType:
    """The extension module `name` that a C file defines, from the cache or compiled in a second or two.

    Args:
        name: of the module.
        source: the C file; it includes the system's and Python's headers only.

    Raises:
        BuildError: there is no compiler, or it fails, or its output does not load.
    """
    try:
        return _build(source, lambda path: _load(name, path))
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise BuildError(detail[0] if detail else type(error).__name__) from error


def _load(name: str, path: str) -> ModuleType:
    loader = ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None, "the loader knows the name"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _build(source: Path, load: Callable[[str], ModuleType]) -> ModuleType:
    compiler = _compiler()
    command = [*compiler, *_COMPILE, f"-I{sysconfig.get_path('include')}"]
    abi = sysconfig.get_config_var("SOABI")
    parts = [source.read_text(encoding="utf8"), *command, platform.machine(), _cpu_features(), abi]
    name = f"{source.stem}.{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    kept = Path(cache_from_source(str(source.with_suffix(".py")))).with_name(name)
    if kept.is_file():
        return load(str(kept))
    with tempfile.TemporaryDirectory(prefix="pic_native-") as folder:
        objects, built = Path(folder, "built.o"), Path(folder, name)
        steps: tuple[list[str | Path], ...] = (
            [*command, source, "-o", objects],
            [*compiler, "-shared", objects, "-o", built],
        )
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        module = load(str(built))
        _keep(built, kept)
    return module


def _compiler() -> list[str]:
    """The command of a C compiler: what `CC` says, else the system's.

    Raises:
        FileNotFoundError: there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    found = next(filter(None, map(shutil.which, named[:1] or ("cc", "gcc", "clang"))), None)
    if found is None:
        raise FileNotFoundError(f"no C compiler ({named[0] if named else 'cc, gcc, clang'}); install gcc or set CC")
    return [found, *named[1:]]


def _keep(built: Path, kept: Path) -> None:
    """Put a library that loads where the next process finds it; a folder that cannot be written to costs a second."""
    beside = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(built, beside)
        # NOTE: ranks of one server compile at the same time; whoever is last replaces an equal file.
        beside.replace(kept)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        logger.debug("%s is not kept: %s", kept, error)


def _cpu_features() -> str:
    """What tells this CPU from others that may see the same folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
