"""Owns making a command's --out folder ready: new, or rid of what an earlier run of the same kind wrote there.

It must not know what a run is. A folder's kind is in its config.json; files that no run writes are never deleted.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec

from sglang_pic.errors import ConfigError

__all__ = ["CONFIG", "RunKind", "claim_folder", "holds_run"]

CONFIG = "config.json"


class RunKind(NamedTuple):
    """A kind of run, and what it leaves in its folder."""

    kind: str
    """As config.json says it."""
    word: str
    """As people say it."""
    owned: tuple[str, ...]
    """Patterns of all files and folders that it writes."""


class _Config(msgspec.Struct, frozen=True):
    kind: str


def claim_folder(folder: Path, run: RunKind, *, force: bool, flags: str = "--force to overwrite it") -> None:
    """Make `folder` a folder for a run, with nothing of an earlier one in it.

    Args:
        force: what an earlier run of this kind wrote is deleted.
        flags: the flags that would help where the folder holds an earlier run, and how.

    Raises:
        ConfigError: it is a file, holds anything else, or holds an earlier run and `force` is not given.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {str(folder)!r} is a file; give a folder that does not exist or is empty.")
    if folder.is_dir() and any(folder.iterdir()):
        if not holds_run(folder, run):
            raise ConfigError(
                f"--out {str(folder)!r} is not empty and is no earlier {run.word}; give an empty or a new folder."
            )
        if not force:
            raise ConfigError(f"--out {str(folder)!r} holds an earlier {run.word}; add {flags}.")
        for path in [path for pattern in run.owned for path in folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def holds_run(folder: Path, run: RunKind) -> bool:
    """Whether a run of this kind began in a folder."""
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config).kind == run.kind
    except (OSError, msgspec.DecodeError):
        return False
