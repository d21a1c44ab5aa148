"""The section of `MODELS.md` on public recipes: how many of those in `recipes.toml` would start, and why not all."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final
from unittest.mock import patch

import msgspec

from pic_bench.pages.families import KINDS, Answer, judge, load_families
from pic_bench.pages.old_flags import renewed
from pic_bench.pages.page_tables import table

SOURCES: Final = ("agentic", "cookbook", "other")
"""The kinds of recipes."""


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
    def servers(self) -> list[list[str]]:
        """The flags of each server of the recipe."""
        return [text.split() for text in (self.server, self.prefill, self.decode) if text]


class Models(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Models that share one configuration."""

    names: list[str]
    family: str
    config: dict[str, Any] = {}


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


def recipes_section() -> str:
    """The section of the page; about a minute."""
    recipes, configs = load_recipes()
    answers = [(recipe, _answer(recipe, configs[recipe.model])) for recipe in recipes]
    num_renamed = sum(any(renewed(flags) != [*flags] for flags in recipe.servers) for recipe in recipes)
    return "".join(f"{line}\n" for line in _lines(answers, num_renamed))


def _answer(recipe: Recipe, config: Mapping[str, Any]) -> Answer:
    """Whether all servers of a recipe would start, each reason once."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, recipe.environment):
        (Path(folder) / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
        answers = []
        for published in recipe.servers:
            flags = renewed([folder if flag == "DRAFT" else flag for flag in published])
            answers.append(judge(folder, flags, recipe.card))
    needed, reasons, refused = (
        list(dict.fromkeys(line for each in part for line in each)) for part in zip(*answers, strict=True)
    )
    return Answer(refused=refused) if refused else Answer(needed, reasons)


def _lines(answers: Sequence[tuple[Recipe, Answer]], num_renamed: int) -> Iterator[str]:
    yield "## Public recipes"
    yield f"Of {len(answers)} public recipes:"
    yield ""
    counts = {f"all {len(answers)}": Counter(answer.kind for _, answer in answers)}
    for source in SOURCES:
        count = Counter(answer.kind for recipe, answer in answers if recipe.kind == source)
        counts[f"{source}, {count.total()}"] = count
    rows = ([kind, *(_share(count, kind) for count in counts.values())] for kind in KINDS)
    yield from table(["", *(f"{title}:" for title in counts)], rows).splitlines()
    yield ""
    yield fill(" ".join(_ABOUT.format(num_renamed=num_renamed).split()), 160, break_on_hyphens=False)
    yield ""
    reasons = Counter(
        line.partition(": ")[0] for _, answer in answers for line in (*answer.refused, *answer.prefix_only)
    )
    named = "; ".join(f"{why} ({n})" for why, n in reasons.most_common())
    yield f"Refused or prefix only because of ([why](REFERENCE.md#what-is-tested-admitted-and-refused)): {named}."


_ABOUT: Final = """The recipes are those that were found in public until October 2026
    ([sources](../bench/pic_bench/pages/recipes.toml)), one for each file, model, card and mode: they are no sample of
    running servers. *Agentic* are InferenceX's agentic files, operators' own, and the agentic ones of Dynamo and
    llm-d; *cookbook* SGLang's, Baseten's and Modal's. {num_renamed} recipes have old names of flags and were asked for
    by the new ones."""


def _share(count: Counter[str], kind: str) -> str:
    return f"{count[kind]} ({100 * count[kind] / count.total():.0f} %)"
