"""Breaks put together: by cause, and within a cause by what the changed place looks like; worst first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from sglang_pic.explain.cause import Cause
from sglang_pic.explain.diagnose import Break

_SIGNATURE_CHARS = 40
_WORD_WITH_DIGITS = re.compile(r"[A-Za-z_-]*\d[A-Za-z0-9_-]*")
_SPACE = re.compile(r"\s+")
# A last line shorter than this does not identify a place.
_MIN_LINE_CHARS = 4


class Group(msgspec.Struct, rename="camel"):
    """Breaks of one cause at places that look alike."""

    number: int
    cause: Cause
    signature: str
    num_calls: int = 0
    num_lost: int = 0
    num_behind: int = 0
    worst_lost: int = -1
    worst_call: int = 0
    """The call that lost most, as an example."""
    num_recovered: int = 0


@dataclass(slots=True)
class Grouping:
    """All groups so far, one for each signature: they grow with the kinds of places, not with the calls."""

    _groups: dict[tuple[Cause, str], Group] = field(default_factory=dict)

    def add(self, found: Break, call: int, agent: str | None) -> Group:
        """Count one call's break in its group."""
        key = (found.cause, _signature(found, agent))
        group = self._groups.setdefault(key, Group(len(self._groups), *key))
        group.num_calls += 1
        group.num_lost += found.num_lost
        group.num_recovered += found.num_recovered
        group.num_behind += found.num_behind
        if found.num_lost > group.worst_lost:
            group.worst_lost, group.worst_call = found.num_lost, call
        return group

    def in_order(self) -> list[Group]:
        """By number, which is the order in which they were first seen."""
        return list(self._groups.values())

    def ranked(self) -> list[Group]:
        """Most tokens lost first, then most tokens behind the breaks, then the group seen first."""
        return sorted(self._groups.values(), key=lambda group: (-group.num_lost, -group.num_behind, group.number))

    def ranked_causes(self) -> list[tuple[Cause, list[Group]]]:
        """The causes that occurred, most tokens lost first, each with its groups ranked."""
        causes: dict[Cause, list[Group]] = {}
        for group in self.ranked():
            causes.setdefault(group.cause, []).append(group)
        return sorted(
            causes.items(), key=lambda item: (-sum(g.num_lost for g in item[1]), -sum(g.num_behind for g in item[1]))
        )


def _signature(found: Break, agent: str | None) -> str:
    match found.cause:
        case Cause.COMPACTION | Cause.NEW_TASK | Cause.REWIND:
            return ""
        case Cause.AGENT if agent is not None:
            return _mask(agent)
        case Cause.MOVED | Cause.REMOVED | Cause.WINDOW | Cause.THOUGHT if found.old.strip():
            # The text before a note differs every time; the note does not.
            return _mask(found.old.strip())[:_SIGNATURE_CHARS]
        case Cause.INSERTED:
            return _mask(found.after.strip())[:_SIGNATURE_CHARS]
        case _:
            text = found.before.rstrip()
            line = text.rsplit("\n", 1)[-1]
            return _mask(line if len(line.strip()) >= _MIN_LINE_CHARS else text)[-_SIGNATURE_CHARS:]


def _mask(text: str) -> str:
    """Digits, and words that contain digits, become `#`."""
    return _SPACE.sub(" ", _WORD_WITH_DIGITS.sub("#", text)).strip()
