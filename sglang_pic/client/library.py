"""The skills that a client has compiled, kept so that they can be compiled again: in memory, or also in a JSON file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from sglang_pic.errors import ConfigError


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server holds of a compiled skill."""

    name: str
    tokens: int
    """Of the system prompt and the skill, in whole pages of the server's cache."""
    digest: str
    """Identifies namespace and tokens: another text, tokenizer or chat template gives another digest."""


class CompiledSkill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A skill with all that is needed to compile it again."""

    receipt: Receipt
    behind: str
    texts: tuple[str, ...]


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: Literal[1] = 1
    skills: tuple[CompiledSkill, ...] = ()


class Library:
    """The skills that were compiled and not dropped, by name, oldest first.

    Args:
        path: the file that keeps them; it is written at each change, and need not be there yet. Programs may share it:
            a change takes in what others have written, under a lock (a file beside it; not on Windows).

    Raises:
        ConfigError: the file is there and is no library.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._skills: dict[str, CompiledSkill] = {}
        self._read()

    def skills(self) -> tuple[CompiledSkill, ...]:
        """All of them."""
        return tuple(self._skills.values())

    def add(self, skill: CompiledSkill) -> None:
        """Keep a skill; it replaces the skill of the same name."""
        with self._changing():
            self._skills.pop(skill.receipt.name, None)
            self._skills[skill.receipt.name] = skill

    def remove(self, name: str) -> None:
        """Forget a skill, if it is there."""
        with self._changing():
            self._skills.pop(name, None)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        with self._path.with_name(f".{self._path.name}.lock").open("wb") as lock:
            with suppress(ImportError):
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            before = self.skills()
            yield
            if self.skills() != before:
                self._write()

    def _read(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{self._path}: not a library of skills ({error}); name another file.") from error
        self._skills = {skill.receipt.name: skill for skill in found.skills}

    def _write(self) -> None:
        if self._path is not None:
            file = _File(skills=self.skills())
            # All of it or nothing: a full disk must not cost the skills that were there.
            part = self._path.with_name(f".{self._path.name}.part")
            try:
                part.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
                part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)
