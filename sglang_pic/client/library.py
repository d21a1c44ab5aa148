"""The skills that a client has compiled, in memory or in a JSON file, so that they can be compiled again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from sglang_pic.errors import ConfigError
from sglang_pic.output import write_whole


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pin that a server made for a skill."""

    name: str
    tokens: int
    """Tokens of the system prompt and the skill, in whole pages."""
    digest: str
    """Hash of namespace and tokens; it changes with the text, the tokenizer and the chat template."""


class CompiledSkill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A skill with its texts, to compile it again."""

    receipt: Receipt
    behind: str
    texts: tuple[str, ...]


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: Literal[1] = 1
    skills: tuple[CompiledSkill, ...] = ()


class Library:
    """The skills that were compiled and not dropped, by name, oldest first.

    Args:
        path: the JSON file, written at each change and created if it is missing. Several programs may share it: a
            change reads the file again under a lock (a file beside it; not on Windows).

    Raises:
        ConfigError: the file exists and is not a library.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._skills: dict[str, CompiledSkill] = {}
        self._read()

    def skills(self) -> tuple[CompiledSkill, ...]:
        """All skills, oldest first."""
        return tuple(self._skills.values())

    def add(self, skill: CompiledSkill) -> None:
        """Add a skill; it replaces the skill of the same name."""
        with self._changing():
            self._skills.pop(skill.receipt.name, None)
            self._skills[skill.receipt.name] = skill

    def remove(self, name: str) -> None:
        """Remove a skill, if there is one of that name."""
        with self._changing():
            self._skills.pop(name, None)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        with self._path.with_name(f".{self._path.name}.lock").open("ab") as lock:
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
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
