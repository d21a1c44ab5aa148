"""The page `COMMANDS.md`: for each family that splices one command, from a public recipe or from its cookbook."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from pic_bench.pages.families import Family, load_families, recommended_flags
from pic_bench.pages.page_tables import table
from pic_bench.pages.recipes import SOURCES, Recipe, load_models, load_recipes
from sglang_pic.adapter.doctor.examine import refusals_of
from sglang_pic.adapter.doctor.old_flags import renewed
from sglang_pic.adapter.doctor.server import Resolved, resolve
from sglang_pic.adapter.sglang.contract import BUILT_FOR
from sglang_pic.adapter.support import Area, Level, find, prefix_only, present
from sglang_pic.errors import UnsupportedError

_CARDS: Final = ("h200", "b200", "h100")
"""The usual nodes of 8, the one that is looked for first at the front."""
_HICACHE: Final = ("--enable-hierarchical-cache", "--hicache-ratio", "2")


class Command(NamedTuple):
    """How a family is served with splices."""

    family: str
    model: str
    """Its name on the hub; `MODEL` where no recipe names one."""
    card: str
    source: str
    """The recipe's name, or the cookbook."""
    environment: dict[str, str]
    flags: list[str]
    """After `sglang serve MODEL`; `DRAFT` is the path of a draft."""
    page_size: int
    attention: str
    """The prefill attention backend."""
    hicache: str
    """The flags of HiCache: the recipe's, or those with which the command starts too; empty if it does not."""
    watch: list[str]
    """Its entries of the matrix that no test ran, and those that are computed instead of spliced."""

    @property
    def line(self) -> str:
        """As it is typed."""
        given = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*given, shlex.join(["sglang", "serve", self.model, *self.flags])])


def commands_page() -> str:
    """The page, with the first candidate of each family that start-up would not refuse; about a minute."""
    recipes, configs = load_recipes()
    found = []
    for family in load_families():
        candidates = _candidates(family, recipes, configs)
        command = next((made for each in candidates if (made := _command(family, *each)) is not None), None)
        found += [] if command is None else [command]
    return "".join(f"{line}\n" for line in _lines(found))


_Candidate = tuple[Recipe, Mapping[str, Any]]


def _candidates(
    family: Family, recipes: Sequence[Recipe], configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[_Candidate]:
    """Recipes of one server on one of `_CARDS`, agentic ones first, and at last the cookbook's flags on each card."""
    names = {name for each in load_models() if each.family == family.name for name in each.names}
    # A command names a model as the hub does, without the remarks of a recipe.
    named = [each for each in recipes if each.model in names and " " not in each.model]
    ours = [each for each in named if each.server and each.card in _CARDS]
    ours.sort(key=lambda each: (SOURCES.index(each.kind), _CARDS.index(each.card), each.name))
    yield from ((each, configs[each.model]) for each in ours)
    for card in _CARDS:
        flags = " ".join(family.flags_on(card))
        recipe = Recipe(
            name="SGLang's cookbook",
            kind="cookbook",
            source=family.source,
            model="MODEL",
            cards=card.upper(),
            card=card,
            server=flags,
        )
        yield recipe, family.config


def _command(family: Family, recipe: Recipe, config: Mapping[str, Any]) -> Command | None:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, recipe.environment):
        (Path(folder) / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
        flags, _ = renewed(recipe.server.split())
        flags, facts = _facts(folder, flags, recipe.card)
        if facts is None:
            return None
        hicache = ""
        if _HICACHE[0] in flags:
            hicache = " ".join(re.findall(r"--(?:enable-hierarchical-cache|hicache-\S+ \S+)", " ".join(flags)))
        elif _facts(folder, [*flags, *_HICACHE], recipe.card)[1] is not None:
            hicache = " ".join(_HICACHE)
    return Command(
        family=family.name,
        model=recipe.model,
        card=recipe.cards,
        source=recipe.name,
        environment=recipe.environment,
        flags=["--radix-cache-backend", "pic", *flags],
        hicache=hicache,
        **facts,
    )


def _facts(folder: str, flags: list[str], card: str) -> tuple[list[str], dict[str, Any] | None]:
    """The flags, with those that a refusal asks for, and what the server would be; None where it would not splice."""
    for _ in range(2):
        try:
            with resolve(folder, [folder if flag == "DRAFT" else flag for flag in flags], card=card) as resolved:
                refused = [*refusals_of(resolved)]
                if prefix_only(resolved.context):
                    return flags, None
                if not refused:
                    return flags, _read(resolved)
        except UnsupportedError as error:
            refused = [str(error)]
        flags = [*flags, *(flag for line in refused for flag in recommended_flags(line))]
    return flags, None


def _read(resolved: Resolved) -> dict[str, Any]:
    attention = find(Area.ATTENTION, resolved.attention)
    watch = [entry.what for level in (Level.ADMITTED, Level.FALLS_BACK) for entry in present(resolved.context, level)]
    if attention is not None and attention.level is Level.ADMITTED:
        watch.insert(0, resolved.attention)
    return {"page_size": resolved.view.page_size, "attention": resolved.attention, "watch": watch}


def _lines(found: Sequence[Command]) -> Iterator[str]:
    yield "# One command for each family"
    for text in _ABOUT:
        yield ""
        yield fill(" ".join(text.split()), 160, break_on_hyphens=False)
    for each in found:
        if each.model == "MODEL":
            continue
        yield ""
        yield f"## {each.family}"
        yield f"On {each.card}, from {each.source}:"
        yield ""
        yield "```console"
        yield f"$ {each.line}"
        yield "```"
        yield ""
        yield f"- pages of {each.page_size}, prefill attention `{each.attention}`"
        yield from (f"- {what}: {said}" for what, said in _notes(each).items() if said)
    yield ""
    yield "## By SGLang's cookbook"
    yield "For these families no public recipe was found: `sglang serve MODEL --radix-cache-backend pic`, and"
    yield ""
    rows = (
        [
            *(each.family, each.card, _code(shlex.join(each.flags[2:])), str(each.page_size), each.attention),
            "; ".join(f"{what}: {said}" for what, said in _notes(each).items() if said),
        ]
        for each in found
        if each.model == "MODEL"
    )
    yield from table(["family", "on", "flags", "pages of:", "attention", ""], rows).splitlines()


def _notes(command: Command) -> dict[str, str]:
    """What else is to be known of a command."""
    hicache = _code(command.hicache) or "refused beside these flags"
    return {"HiCache": "" if command.hicache == " ".join(_HICACHE) else hicache, "watch": ", ".join(command.watch)}


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


_ABOUT: Final = (
    f"""`make recipes` wrote this page, for SGLang {BUILT_FOR}. For each family
    that splices it takes a [public recipe](MODELS.md#public-recipes) of one server on H200, B200 or H100, agentic ones
    first, and else the flags of SGLang's cookbook, and adds `--radix-cache-backend pic` and the flags that refusals ask
    for. No weights were read, and no GPU has run any of it.""",
    f"""Parsers, ports and paths are left out; MODEL and DRAFT are yours. Each also starts with
    `{" ".join(_HICACHE)}`, unless a line says otherwise: HiCache takes `--hicache-ratio` times the rows of the KV pool
    in host memory, on each rank. *Watch* names entries of
    [the matrix](REFERENCE.md#what-is-tested-admitted-and-refused) that no test has run, or that such a server computes
    instead of splicing.""",
)
