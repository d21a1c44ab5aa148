"""Files that a verb writes: checks of their paths, and writing all of a file or none of it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from sglang_pic.errors import ConfigError


def output_path(out: str | Path, what: str, *, is_forced: bool) -> Path:
    """The path to write to, after checks.

    Args:
        out: the argument.
        what: names the output in messages.
        is_forced: replace an existing file, or a link by a file.

    Raises:
        ConfigError: it is a folder or a device, its folder does not exist, or the file or a link exists.
    """
    path = Path(out).expanduser()
    if path.is_dir():
        raise ConfigError(f"--out={str(out)!r}: is a folder; name the {what} to write.")
    if not path.parent.is_dir():
        raise ConfigError(f"--out={str(out)!r}: the folder {str(path.parent)!r} does not exist; make it first.")
    if path.parent == Path("/dev") or (path.exists() and not path.is_file()):
        raise ConfigError(f"--out={str(out)!r}: is no regular file; name the {what} to write.")
    if os.path.lexists(path) and not is_forced:
        raise ConfigError(f"--out={str(out)!r}: exists; name another file, or replace it with --force.")
    return path


def write_whole(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write all of a file, or leave what was there. A link is replaced, not followed; a file keeps its permissions.

    Raises:
        ConfigError: the path is a folder, or its folder does not exist.
        OSError: it names `path`; the disk is full, for example.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
        if path.is_file() and not path.is_symlink():
            shutil.copymode(path, part)
        part.replace(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(f"{str(path)!r}: cannot be written there; name another file.") from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)
