"""Checks for every family of models whether its servers would start, and weights the answers by use."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final

import msgspec

from sglang_pic.adapter.doctor.cards import CARDS
from sglang_pic.adapter.doctor.examine import refusals_of
from sglang_pic.adapter.doctor.server import resolve
from sglang_pic.adapter.sglang.contract import BUILT_FOR
from sglang_pic.adapter.support import prefix_only
from sglang_pic.errors import Refused, UnsupportedError
from sglang_pic.page_tables import table

_SM100: Final = (10, 0)


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


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the servers of a family would start on a card."""

    card: str
    flags: str
    """Those that they are started with."""
    needed: str = ""
    """Further flags with which alone they start; empty if they start without, or not at all."""
    prefix_only: str = ""
    """Why they get SGLang's own cache and splice nothing; empty where they splice, or do not start."""
    refused: str = ""
    """Why they do not start; empty where they do."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The answers for one family, by card."""

    name: str
    weight: int
    source: str
    unsure: str
    answers: list[Answer]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the served models on one card, in `[0, 1]`."""

    card: str
    starts: float
    with_flags: float
    prefix_only: float
    refused: float


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The answers for all families on the given cards."""

    families: list[Answers]
    shares: list[Share]


def load_families() -> list[Family]:
    """All families, the most served first."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf8"))
    return msgspec.convert(table["family"], list[Family])


def survey(cards: Sequence[str]) -> Survey:
    """Check every family on each of `cards`, as the doctor does for one model.

    Raises:
        ConfigError: a flag is none of SGLang's.
    """
    found = []
    for family in load_families():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({"dtype": "bfloat16"} | family.config))
            answers = [_answer(family, folder, card) for card in cards]
        found.append(
            Answers(name=family.name, weight=family.weight, source=family.source, unsure=family.unsure, answers=answers)
        )
    return Survey(families=found, shares=[_share(card, found) for card in cards])


def render(found: Survey) -> str:
    """The page `MODELS.md`."""
    return "".join(f"{line}\n" for line in _lines(found))


def _answer(family: Family, folder: str, card: str) -> Answer:
    flags = family.flags_on(card)
    reason, refused = judge(folder, flags, card)
    needed = [flag for line in refused for flag in ways_out(line)]
    if needed:
        reason, refused = judge(folder, [*flags, *needed], card)
    why = shortened(refused[0]) if refused else ""
    needs = "" if refused else " ".join(needed)
    return Answer(card=card, flags=" ".join(flags), needed=needs, prefix_only=reason, refused=why)


def judge(folder: str, flags: Sequence[str], card: str) -> tuple[str, list[str]]:
    """The reason why a server would be prefix only, and the reasons why it would not start."""
    try:
        with resolve(folder, flags, card=card) as resolved:
            return prefix_only(resolved.context), [*refusals_of(resolved)]
    except UnsupportedError as error:
        return "", [str(error)]


def ways_out(line: str) -> list[str]:
    """The flags that a refusal recommends."""
    found = re.search(r"; start with (--[^,;.]+)", line)
    return found[1].split() if found else []


def shortened(line: str) -> str:
    """A refusal without the words that all refusals share."""
    before, after = Refused("REASON").line("WHAT").split("WHAT: REASON")
    return line.removeprefix(before).removesuffix(after)


def _share(card: str, found: Sequence[Answers]) -> Share:
    total = sum(each.weight for each in found)
    weights = dict.fromkeys(_SHOWN, 0)
    for each in found:
        (answer,) = (answer for answer in each.answers if answer.card == card)
        weights[_kind(answer)] += each.weight
    return Share(card=card, **{name: weight / total for name, weight in weights.items()})


def _lines(found: Survey) -> Iterator[str]:
    cards = [share.card for share in found.shares]
    yield "# Which models start"
    yield ""
    yield f"Of what people serve with SGLang {BUILT_FOR}, `--radix-cache-backend pic` starts"
    yield ""
    on_cards = table(
        ["on", "with splices:", "with splices and one more flag:", "as prefix only:", "not:"],
        ([share.card.upper(), *(_percent(getattr(share, kind)) for kind in _SHOWN)] for share in found.shares),
    )
    yield from on_cards.splitlines()
    yield from (line for text in _ABOUT for line in ("", fill(" ".join(text.split()), 160, break_on_hyphens=False)))
    yield ""
    total = sum(each.weight for each in found.families)
    families = table(
        ["models", "share:", *map(str.upper, cards), "what to add, or why not"],
        (
            [each.name, _percent(each.weight / total) if each.weight else "", *map(_shown, each.answers), _why(each)]
            for each in found.families
        ),
    )
    yield from families.splitlines()
    yield ""
    yield "Not looked up again, so perhaps not as published:"
    yield ""
    yield from (f"- {each.name}: {each.unsure}" for each in found.families if each.unsure)


_ABOUT: Final = (
    """`sglang-pic doctor --families > sglang_pic/MODELS.md` wrote this page. For each family it asks what `sglang-pic
    doctor MODEL` asks for one model: SGLang resolves the arguments with which its cookbook starts the family, on
    the family's configuration, and the plugin's tables are read. *Splices* means that these checks pass. *Prefix
    only* means that SGLang's own cache serves the model, as without the flag. No weights were read, and no GPU has
    run any of it. On the live model start-up checks the rest: that rows are moved correctly, what a splice costs and
    how answers change.""",
    """A share is the family's part of the stored revisions of SGLang's cookbook pages (until October 2026): what
    people work on there, not how many servers run it. A family without a share has no page.""",
)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _kind(answer: Answer) -> str:
    """Which of `_SHOWN` an answer is."""
    if answer.refused:
        return "refused"
    return "prefix_only" if answer.prefix_only else "with_flags" if answer.needed else "starts"


def _shown(answer: Answer) -> str:
    return _SHOWN[_kind(answer)]


def _why(family: Answers) -> str:
    """The flags to add or the reason for a refusal, with the cards if they differ."""
    cards: dict[str, list[str]] = {}
    for answer in family.answers:
        needed = f"`{answer.needed}`" if answer.needed else ""
        if why := answer.refused or answer.prefix_only or needed:
            cards.setdefault(why, []).append(answer.card.upper())
    if len(cards) == 1:
        return next(iter(cards))
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in cards.items())


_SHOWN: Final = {"starts": "splices", "with_flags": "with a flag", "prefix_only": "prefix only", "refused": "no"}
"""The shares of `Share`, and how an answer is shown."""
