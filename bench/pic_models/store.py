"""Writes a checkpoint folder all at once or not at all, and recognises a finished one by its marker file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from pic_models.checkpoint import Progress
from sglang_pic.errors import ConfigError, PicError

MARKER_NAME = "sglang-pic-model.json"


class Marker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The marker file of a finished folder, written last."""

    schema_version: int = 1
    name: str
    fingerprint: str
    """Identifies the source and the way it was converted."""

    files: dict[str, str]
    """File name to xxh3-128 of its content, for every other file of the folder."""


def build(
    target: Path, name: str, fingerprint: str, write: Callable[[Path, Progress], None], progress: Progress
) -> Path:
    """Return `target` holding the finished model, calling `write` on a temporary folder beside it if it is not there.

    Two processes may call this for the same folder at once: the second waits and finds it finished.

    Args:
        target: The folder to make; its parent folders are created.
        name: Name of the model, for the marker.
        fingerprint: A digest of the inputs; a folder made from another fingerprint is made again.
        write: Fills an empty folder; gets it and `progress`.
        progress: Takes a line of text per step.

    Raises:
        ConfigError: `target` holds files that this module did not put there, or its folder cannot be written.
    """
    target = Path(os.path.abspath(target))
    if _is_finished(target, fingerprint):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = target.with_name(f".{target.name}.lock").open("a")
    except OSError as error:
        why = f"cannot be written there ({error.strerror}); name another folder."
        raise ConfigError(f"target={str(target)!r}: {why}") from error
    with opened as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_finished(target, fingerprint):
            return target
        _check_replaceable(target)
        partial, retired = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "retired"))
        for leftover in (partial, retired):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            _fill(partial, write, progress)
            for path in partial.iterdir():
                path.chmod(0o644)  # some writers make files that only their owner can read
            files = {path.name: digest_file(path) for path in sorted(partial.iterdir())}
            marker = Marker(name=name, fingerprint=fingerprint, files=files)
            (partial / MARKER_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(marker)) + b"\n")
            if target.exists():
                target.rename(retired)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(retired, ignore_errors=True)
    progress(f"{name}: ready in {target}")
    return target


def _fill(folder: Path, write: Callable[[Path, Progress], None], progress: Progress) -> None:
    from safetensors import SafetensorError

    try:
        write(folder, progress)
    except SafetensorError as error:
        # The disk's own message.
        raise PicError(f"{folder}: cannot be written: {error}") from error


def digest_file(path: Path) -> str:
    """The xxh3-128 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def _is_finished(target: Path, fingerprint: str) -> bool:
    try:
        marker = msgspec.json.decode((target / MARKER_NAME).read_bytes(), type=Marker)
    except (OSError, msgspec.MsgspecError):
        return False
    return marker.fingerprint == fingerprint and all(
        (target / name).is_file() and digest_file(target / name) == digest for name, digest in marker.files.items()
    )


def _check_replaceable(target: Path) -> None:
    if not os.path.lexists(target) or (target / MARKER_NAME).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ConfigError(
            f"target={str(target)!r}: exists and was not made by `sglang-pic model`; "
            "name a folder that is new or empty."
        )
