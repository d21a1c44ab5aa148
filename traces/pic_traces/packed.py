"""Files that may have been packed by gzip since they were written, as those of kept runs are."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path


def packed(path: Path) -> Path:
    """Where a file lies once it was packed."""
    return path.with_name(f"{path.name}.gz")


def is_written(path: Path) -> bool:
    """Whether there is such a file, packed or not."""
    return path.exists() or packed(path).exists()


def read_written(path: Path) -> bytes:
    """The file's bytes; of the two the unpacked one, where both are there.

    Raises:
        OSError: neither is there, or it cannot be read or unpacked.
    """
    if path.exists() or not packed(path).exists():
        return path.read_bytes()
    try:
        return gzip.decompress(packed(path).read_bytes())
    except (EOFError, zlib.error) as error:
        raise OSError(f"{packed(path)} cannot be unpacked: {error}") from error
