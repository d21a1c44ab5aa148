"""Checks for every public recipe in `recipes.toml` whether its servers would start."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, Final
from unittest.mock import patch

import msgspec

from sglang_pic.adapter.doctor.families import judge, load_families, shortened, ways_out
from sglang_pic.adapter.doctor.old_flags import renewed
from sglang_pic.adapter.sglang.contract import BUILT_FOR
from sglang_pic.page_tables import table


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published command line for a model; `recipes.toml` explains the fields."""

    name: str
    kind: str
    source: str
    model: str
    cards: str
    card: str
    server: str = ""
    prefill: str = ""
    decode: str = ""
    environment: dict[str, str] = {}

    @property
    def roles(self) -> dict[str, list[str]]:
        """The flags of each server of the recipe, by role."""
        flags = {"server": self.server, "prefill": self.prefill, "decode": self.decode}
        return {role: text.split() for role, text in flags.items() if text}


class Models(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Models that share one configuration."""

    names: list[str]
    family: str
    config: dict[str, Any] = {}


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the servers of a recipe would start."""

    recipe: Recipe
    needed: str = ""
    """Further flags with which alone they start; empty if they start without, or not at all."""
    prefix_only: list[str] = []
    """Why they get SGLang's own cache and splice nothing; empty where they splice, or do not start."""
    refused: list[str] = []
    """Why they do not start, once each; empty where they do."""
    renamed: list[str] = []
    """Its old names of flags, and what they are called; the answer is for the new ones."""

    @property
    def answer(self) -> str:
        """One of `ANSWERS`."""
        if self.refused:
            return "refused"
        return "prefix only" if self.prefix_only else "with a flag" if self.needed else "splices"


class RecipeSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """All recipes."""

    recipes: list[Judged]

    def counts(self, kind: str | None = None) -> Counter[str]:
        """Number of recipes by answer, of one kind or of all."""
        return Counter(each.answer for each in self.recipes if kind in (None, each.recipe.kind))


ANSWERS: Final = ("splices", "with a flag", "prefix only", "refused")
KINDS: Final = ("agentic", "cookbook", "other")


def load_recipes() -> tuple[list[Recipe], dict[str, dict[str, Any]]]:
    """All recipes, and the configurations of their models by name."""
    families = {family.name: family.config for family in load_families()}
    configs = {name: families[each.family] | each.config for each in load_models() for name in each.names}
    return msgspec.convert(_table()["recipe"], list[Recipe]), configs


def load_models() -> list[Models]:
    """The models of all recipes."""
    return msgspec.convert(_table()["models"], list[Models])


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf8"))


def survey_recipes() -> RecipeSurvey:
    """Check every recipe, as the doctor does for one server; about a second each.

    Raises:
        ConfigError: a flag is none of SGLang's.
    """
    recipes, configs = load_recipes()
    return RecipeSurvey(recipes=[_judge(recipe, configs[recipe.model]) for recipe in recipes])


def render_recipes(found: RecipeSurvey) -> str:
    """The page `RECIPES.md`."""
    return "".join(f"{line}\n" for line in _lines(found))


def _judge(recipe: Recipe, config: Mapping[str, Any]) -> Judged:
    refused, needed, renamed, reasons = list[str](), list[str](), list[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, recipe.environment):
        (Path(folder) / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
        for published in recipe.roles.values():
            flags, said = renewed([folder if flag == "DRAFT" else flag for flag in published])
            renamed += said
            reason, lines = judge(folder, flags, recipe.card)
            wanted = [flag for line in lines for flag in ways_out(line)]
            if wanted and not judge(folder, [*flags, *wanted], recipe.card)[1]:
                lines, needed = [], [*needed, *wanted]
            reasons += [reason] if reason else []
            refused += map(shortened, lines)
    return Judged(
        recipe=recipe,
        needed="" if refused else " ".join(dict.fromkeys(needed)),
        prefix_only=[] if refused else [*dict.fromkeys(reasons)],
        refused=[*dict.fromkeys(refused)],
        renamed=[*dict.fromkeys(renamed)],
    )


def _lines(found: RecipeSurvey) -> Iterator[str]:
    total = len(found.recipes)
    yield "# Which public recipes start"
    yield ""
    yield f"Of {total} public recipes, with SGLang {BUILT_FOR} and `--radix-cache-backend pic`:"
    yield ""
    counts = [found.counts(), *map(found.counts, KINDS)]
    rows = ([answer, *(_share(count, answer) for count in counts)] for answer in ANSWERS)
    heads = ["", f"all {total}:", *(f"{kind}, {each.total()}:" for kind, each in zip(KINDS, counts[1:], strict=True))]
    yield from table(heads, rows).splitlines()
    num_renamed = sum(bool(each.renamed) for each in found.recipes)
    for text in _ABOUT:
        yield ""
        yield fill(" ".join(text.format(num_renamed=num_renamed).split()), 160, break_on_hyphens=False)
    yield ""
    reasons: dict[str, int] = {}
    shown = table(
        ["model", "recipe", "card", "answer", "what to add, or why not, by number"],
        (
            [each.recipe.model, each.recipe.name, each.recipe.cards, each.answer, _why(each, reasons)]
            for each in sorted(found.recipes, key=lambda each: (KINDS.index(each.recipe.kind), each.recipe.name))
        ),
    )
    yield from shown.splitlines()
    yield ""
    yield from (f"{number}. {reason}" for reason, number in reasons.items())


_ABOUT: Final = (
    """`sglang-pic doctor --recipes > sglang_pic/RECIPES.md` wrote this page. For each recipe SGLang resolves its
    flags on the model's configuration, for each of its servers, and the plugin's tables are read; both servers of
    PD get the flag. *Splices* means that these checks pass, *prefix only* that SGLang's own cache serves the model.
    No weights were read, and no GPU has run any of it.""",
    """The recipes are those that were found in public until October 2026, one for each file, model, card and mode,
    with equal weight: they are no sample of what people run. *Agentic* are InferenceX's agentic files, operators'
    own, and the agentic ones of Dynamo and llm-d; *cookbook* SGLang's, Baseten's and Modal's. Their sources are in
    `sglang-pic doctor --recipes --json`. {num_renamed} have names of flags that SGLang no longer takes; they were
    asked for by the new ones, which `sglang-pic doctor` says where it meets an old one.""",
)


def _share(count: Counter[str], answer: str) -> str:
    return f"{count[answer]} ({100 * count[answer] / count.total():.0f} %)"


def _why(judged: Judged, reasons: dict[str, int]) -> str:
    """The flag that helps, or the numbers of the reasons; takes new ones into `reasons`."""
    lines = (line.removesuffix(".") for line in (*judged.refused, *judged.prefix_only))
    numbers = ", ".join(str(reasons.setdefault(line, len(reasons) + 1)) for line in lines)
    return numbers or (f"`{judged.needed}`" if judged.needed else "")
