"""Claims a folder for a run, deletes the files of an earlier run of its kind, and reads and writes its JSON files.

A folder's kind is in its config.json. Files that no run writes are never deleted.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import msgspec

from sglang_pic.errors import BenchError, ConfigError
from sglang_pic.output import write_whole

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
T = TypeVar("T")
_SECRET = r"(?<![\w-])--(?:[\w-]+-)?(?:api-k\w*|password|secret|cache-salt|(?:auth|access|hf)-token)"
_GIVEN_SECRET = re.compile(rf"({_SECRET}(?:=|\s+))('[^']*'|\"[^\"]*\"|\S+)")
_SECRET_NEXT = re.compile(rf"{_SECRET}\s*$")


class RunKind(NamedTuple):
    """A kind of run, and the files in its folder."""

    kind: str
    """As in config.json."""
    word: str
    """As in messages."""
    owned: tuple[str, ...]
    """Patterns of all files and folders that the run writes."""


class _Config(msgspec.Struct, frozen=True):
    kind: str
    scenes: list[str] = []


def claim_folder(folder: Path, run: RunKind, *, force: bool, flags: str = "--force to overwrite it") -> None:
    """Make `folder` a folder for a run, with nothing of an earlier run in it.

    Args:
        force: delete the files of an earlier run of this kind.
        flags: the flags that the message recommends if the folder has an earlier run.

    Raises:
        ConfigError: `folder` is a file, holds anything else, holds an earlier run and `force` is not given, or cannot
            be written.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"--out {str(folder)!r} is a file; give a folder that does not exist or is empty.")
    if folder.is_dir() and any(folder.iterdir()):
        if not holds_run(folder, run):
            raise ConfigError(
                f"--out {str(folder)!r} is not empty and holds no earlier {run.word}; give an empty or a new folder."
            )
        if not force:
            raise ConfigError(f"--out {str(folder)!r} holds an earlier {run.word}; add {flags}.")
        found = [path for pattern in run.owned for path in folder.glob(pattern)]
        # `glob` omits links to nothing.
        for path in [*(folder / name for name in (*scenes_of(folder), *run.owned)), *found]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {str(folder)!r} cannot be made ({error.strerror}); give another folder.") from error


def claim_or_continue(folder: Path, run: RunKind, config: msgspec.Struct, *, resume: bool, force: bool) -> bool:
    """Make `folder` ready for a run: new, or an earlier run's that is continued or, with `force`, deleted.

    Returns:
        Whether an earlier run is continued.

    Raises:
        ConfigError: it holds something else, an earlier run that neither flag speaks of, or another configuration's.
        BenchError: its configuration cannot be read.
    """
    if not (resume and holds_run(folder, run)):
        claim_folder(folder, run, force=force, flags="--resume or --force")
        return False
    read = read_json(folder / CONFIG, type(config), f"of a {run.word} that this version can read")
    there, here = (_hidden(msgspec.to_builtins(found)) for found in (read, config))
    if differing := [f"{k} is {there[k]!r} there and {here[k]!r} here" for k in there if there[k] != here[k]]:
        raise ConfigError(
            f"--resume: {folder / CONFIG} says another run than this command: {'; '.join(differing)}. Repeat its "
            "arguments, or give a new folder."
        )
    return True


def holds_run(folder: Path, run: RunKind) -> bool:
    """Whether a run of this kind began in a folder."""
    config = _read(folder)
    return config is not None and config.kind == run.kind


def scenes_of(folder: Path) -> list[str]:
    """The scene folders of a comparison on several traces; empty for any other run."""
    config = _read(folder)
    # A name that leads out of the folder is none that a run wrote.
    return [name for name in config.scenes if Path(name).name == name] if config is not None else []


def read_json(path: Path, kind: type[T], word: str) -> T:
    """The content of a run's JSON file.

    Raises:
        BenchError: the file is missing or holds something else; the message calls for `word`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, ConfigError) as error:
        raise BenchError(f"{path}: not {word} ({error}).") from error


def write_json(path: Path, value: msgspec.Struct | Mapping[str, object]) -> None:
    """Write `value` as indented JSON with a final newline, all of it or nothing; secrets of server flags are hidden."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(_hidden(msgspec.to_builtins(value))), indent=2) + b"\n")


def without_secrets(words: Iterable[str]) -> list[str]:
    """The words of a command with `***` in the place of keys, passwords, tokens and salts, also of those in a word."""
    kept: list[str] = []
    is_secret = False
    for word in words:
        if is_secret and word == "--server-arg":
            kept.append(word)
        elif is_secret:
            kept.append("--server-arg=***" if word.startswith("--server-arg=") else "***")
            is_secret = False
        else:
            kept.append(_GIVEN_SECRET.sub(r"\1***", word))
            is_secret = _SECRET_NEXT.search(word) is not None
    return kept


def _hidden(value: T) -> T:
    """A value of JSON, its lists of words without secrets."""
    if isinstance(value, dict):
        return cast(T, {key: _hidden(each) for key, each in value.items()})
    if isinstance(value, list):
        is_text = bool(value) and all(isinstance(each, str) for each in value)
        return cast(T, without_secrets(value) if is_text else [_hidden(each) for each in value])
    return value


def _read(folder: Path) -> _Config | None:
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError):
        return None


def print_report(folder: Path, headline: Callable[[Path], str], *, as_json: bool) -> None:
    """Print summary.json, or what the report of a run says first and where the page lies, to stdout."""
    if as_json:
        print((folder / "summary.json").read_text("utf8"), end="")
    else:
        print(f"{headline(folder)}\nReport: {folder / 'report.html'}")
