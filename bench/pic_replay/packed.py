"""Files that may have been packed with gzip after they were written, as in runs that are kept."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path


def packed(path: Path) -> Path:
    """The path of the packed file."""
    return path.with_name(f"{path.name}.gz")


def is_written(path: Path) -> bool:
    """Whether the file exists, packed or not."""
    return path.exists() or packed(path).exists()


def read_written(path: Path) -> bytes:
    """The file's bytes; the unpacked file's if both exist.

    Raises:
        OSError: neither is there, or it cannot be read or unpacked.
    """
    if path.exists() or not packed(path).exists():
        return path.read_bytes()
    try:
        return gzip.decompress(packed(path).read_bytes())
    except (EOFError, zlib.error) as error:
        raise OSError(f"{packed(path)} cannot be unpacked: {error}") from error
