"""The page `MODELS.md`: for every family of models whether its servers would start, and how much it is used."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final, NamedTuple

import msgspec

from pic_bench.pages.page_tables import table
from sglang_pic.adapter.doctor.cards import CARDS
from sglang_pic.adapter.doctor.examine import refusals_of
from sglang_pic.adapter.doctor.server import resolve
from sglang_pic.adapter.sglang.contract import BUILT_FOR
from sglang_pic.adapter.support import prefix_only
from sglang_pic.errors import Refused, UnsupportedError

_SHOWN_CARDS: Final = ("h100", "h200", "b200")
_SM100: Final = (10, 0)
KINDS: Final = ("splices", "with a flag", "prefix only", "refused")
"""The kinds of answers."""


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Models that SGLang serves alike; `families.toml` explains the fields."""

    name: str
    config: dict[str, Any]
    source: str
    revisions: dict[str, int] = {}
    flags: str = ""
    blackwell: str | None = None
    unsure: str = ""

    @property
    def weight(self) -> int:
        """Number of stored revisions of its pages."""
        return sum(self.revisions.values())

    def flags_on(self, card: str) -> list[str]:
        """The flags of its servers on a card."""
        other = self.blackwell if CARDS[card] >= _SM100 else None
        return (self.flags if other is None else other).split()


class Answer(NamedTuple):
    """Whether servers would start."""

    needed: Sequence[str] = ()
    """Further flags with which alone they start; empty if they start without, or not at all."""
    prefix_only: Sequence[str] = ()
    """Why they get SGLang's own cache and splice nothing; empty where they splice, or do not start."""
    refused: Sequence[str] = ()
    """Why they do not start; empty where they do."""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        *_, kind = (kind for kind, why in zip(KINDS, ((True,), *self), strict=True) if why)
        return kind

    @property
    def added(self) -> str:
        """The flags to add, as code."""
        return f"`{' '.join(self.needed)}`" if self.needed else ""


def load_families() -> list[Family]:
    """All families, the most served first."""
    families = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf8"))
    return msgspec.convert(families["family"], list[Family])


def judge(folder: str, flags: Sequence[str], card: str) -> Answer:
    """Whether a server would start, also with the flags that its refusals recommend."""
    reason, refused = _judge(folder, flags, card)
    needed = [flag for line in refused for flag in recommended_flags(line)]
    if needed:
        reason, still_refused = _judge(folder, [*flags, *needed], card)
        refused = refused if still_refused else []
    if refused:
        return Answer(refused=[*map(_shortened, refused)])
    return Answer(needed, [reason] if reason else [])


def recommended_flags(line: str) -> list[str]:
    """The flags that a refusal recommends."""
    found = re.search(r"; start with (--[^,;.]+)", line)
    return found[1].split() if found else []


def models_page() -> str:
    """The page; about 40 seconds."""
    return "".join(f"{line}\n" for line in _lines())


def _judge(folder: str, flags: Sequence[str], card: str) -> tuple[str, list[str]]:
    """The reason why a server would be prefix only, and the reasons why it would not start."""
    try:
        with resolve(folder, flags, card=card) as resolved:
            return prefix_only(resolved.context), [*refusals_of(resolved)]
    except UnsupportedError as error:
        return "", [str(error)]


def _shortened(line: str) -> str:
    """A refusal without the words that all refusals share."""
    before, after = Refused("REASON").line("WHAT").split("WHAT: REASON")
    return line.removeprefix(before).removesuffix(after)


def _on_each_card(family: Family) -> list[Answer]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"dtype": "bfloat16"} | family.config))
        return [judge(folder, family.flags_on(card), card) for card in _SHOWN_CARDS]


def _lines() -> Iterator[str]:
    families = load_families()
    answers = {family.name: _on_each_card(family) for family in families}
    total = sum(family.weight for family in families)
    yield "# Which models start"
    yield ""
    yield f"Of what people serve with SGLang {BUILT_FOR}, `--radix-cache-backend pic` starts"
    yield ""
    shares = [["on", "with splices:", "with splices and one more flag:", "as prefix only:", "not:"]]
    for at, card in enumerate(_SHOWN_CARDS):
        weights = dict.fromkeys(KINDS, 0)
        for family in families:
            weights[answers[family.name][at].kind] += family.weight
        shares.append([card.upper(), *(_percent(weight / total) for weight in weights.values())])
    yield from table(shares[0], shares[1:]).splitlines()
    yield ""
    yield fill(" ".join(_ABOUT.split()), 160, break_on_hyphens=False)
    yield ""
    groups: dict[str, list[str]] = {}
    for family in families:
        share = f" ({_percent(family.weight / total)})" if family.weight else ""
        groups.setdefault(_said(answers[family.name]), []).append(f"{family.name}{share}")
    for said, names in groups.items():
        yield f"- **{said}**: {'; '.join(names)}"
    yield ""
    num_unsure = sum(bool(family.unsure) for family in families)
    yield f"Flags or configurations of {num_unsure} families, `unsure` in that file, are perhaps not as published."


_ABOUT: Final = """`make recipes` wrote this page from the answers of `sglang-pic doctor`, with the arguments
    of SGLang's cookbook ([flags](../bench/pic_bench/pages/families.toml)) on each family's configuration.
    *Prefix only* means that SGLang's own cache serves the model, as without the flag. No weights were read,
    and no GPU has run any of it. Start-up checks the rest on the live model. A family's share is its part of
    the revisions of SGLang's cookbook pages until October 2026, not of running servers."""


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _said(answers: Sequence[Answer]) -> str:
    """The answers of all cards in words, once where they are one, each with the flags to add or its first reason."""
    cards: dict[str, list[str]] = {}
    for card, answer in zip(_SHOWN_CARDS, answers, strict=True):
        reason = next(iter((*answer.refused, *answer.prefix_only)), answer.added)
        cards.setdefault(f"{answer.kind}{f', {reason}' if reason else ''}", []).append(card.upper())
    if len(cards) == 1:
        return next(iter(cards))
    return "; ".join(f"{', '.join(names)}: {said}" for said, names in cards.items())
