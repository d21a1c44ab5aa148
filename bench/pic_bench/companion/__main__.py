"""Writes the companion page from the records in bench/results: `python -m pic_bench.companion --out PAGE`.

No number on it is new. Where the page draws which tokens were spliced, today's planner has planned the recorded prompt
again, and the drawing is shown only if it has as many tokens of each kind as the server had.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import ChoiceLoader, Environment, PackageLoader

from pic_bench.companion.calls import Scene, read_scenes
from pic_bench.companion.edits import Edits, read_edits
from pic_bench.companion.snippets import SnippetPool
from pic_bench.report.numbers import JINJA
from pic_bench.report.stats import Estimate
from pic_bench.report.study import rows_of
from sglang_pic.output import write_whole

# Where an asset is looked for, in this order; the page of `explain` has the colours and the style that both share.
_PACKAGES = ("pic_bench.companion", "sglang_pic.explain")
_STYLES = ("palette.css", "page.css", "companion.css")
_SCRIPTS = ("payload.js", "text.js", "parts.js", "calls.js", "dials.js", "edits.js", "companion.js")
_MAX_TEXT_BYTES = 4_000_000

JINJA.filters["by_setting"] = lambda found: [
    {"set": name, "setting": setting, **counts} for name, all_ in found.items() for setting, counts in all_.items()
]


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a setting; None if it was not measured."""

    label: str
    n: int
    """Prompts, or sessions, behind the loss."""
    spliced: float
    loss: Estimate | None
    same_first: Estimate | None
    recovery: Estimate | None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One set of prompts under every value.

    Args:
        of: the whole of the spliced share.
        measure: the measure of the loss, in nats.
        unit: the unit that `n` counts.
    """

    title: str
    record: str
    of: str
    measure: str
    unit: str
    stops: list[Stop]


class Dial(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, with every series that has several of its values."""

    name: str
    series: list[Series]


class Payload(msgspec.Struct, frozen=True, rename="camel"):
    """The data that the page's script reads. Texts are indices into `texts`."""

    scenes: list[Scene]
    dials: list[Dial]
    edits: Edits
    texts: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page.

    Raises:
        BenchError: a record cannot be read.
        TraceError: the tokenizer is missing.
    """
    parser = argparse.ArgumentParser(prog="python -m pic_bench.companion", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="PAGE", help="the HTML file to write")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=Path(".models/smollm2"),
        metavar="DIR",
        help="folder of the records' model, SmolLM2; `sglang-pic model smollm2 DIR` writes it (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    page = html_page(read_payload(args.tokenizer)).encode()
    write_whole(args.out, page)
    print(f"page: {args.out} ({len(page) / 1e6:.2f} MB)", file=sys.stderr)
    return 0


def read_payload(tokenizer: Path) -> Payload:
    """Everything that the page shows.

    Args:
        tokenizer: folder of the records' model, for the text of its tokens.
    """
    texts = SnippetPool(_MAX_TEXT_BYTES)
    scenes, edits = read_scenes(tokenizer, texts), read_edits(tokenizer, texts)
    return Payload(scenes, read_dials(), edits, texts.texts)


def html_page(payload: Payload) -> str:
    """The whole page, which needs no other file and may load none."""
    loader = ChoiceLoader([PackageLoader(package, "assets") for package in _PACKAGES])
    assets = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    style, source = ("".join(loader.get_source(assets, name)[0] for name in names) for names in (_STYLES, _SCRIPTS))
    script = f'\n(() => {{\n"use strict";\n{source}}})();\n'
    return assets.get_template("companion.html.j2").render(
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # Deflated JSON in base64: no markup can be written in this alphabet.
        packed=base64.b64encode(zlib.compress(msgspec.json.encode(payload), 9)).decode(),
    )


def read_dials() -> list[Dial]:
    """Every setting, in the order of the file.

    Raises:
        KeyError: a record lacks what the file names.
    """
    listed = msgspec.toml.decode(
        Path(__file__).with_name("dials.toml").read_bytes(), type=dict[str, list[dict[str, Any]]]
    )
    return [
        Dial(name=name, series=[series for wanted in all_wanted for series in _series(wanted)])
        for name, all_wanted in listed.items()
    ]


def _series(wanted: dict[str, Any]) -> list[Series]:
    """A series for each group of rows, its stops in the order of `stops`."""
    labels: dict[str, str] = wanted["stops"]
    figures = {name: JINJA.compile_expression(wanted.get(name, "none")) for name in Stop.__struct_fields__[1:]}
    found = []
    for record, title in wanted["records"].items():
        for first in rows_of({**wanted, "records": {record: title}}):
            rows = {row[wanted["stop"]]: row for row in first["group"]}
            stops = [
                msgspec.convert({"label": label, **{name: read(rows[key]) for name, read in figures.items()}}, Stop)
                for key, label in labels.items()
                if key in rows
            ]
            words = {name: wanted.get(name, "") for name in ("of", "measure", "unit")}
            words["title"] = JINJA.from_string(wanted.get("title", "{{ title }}")).render(first)
            found.append(Series(record=record, stops=stops, **words))
    return found


if __name__ == "__main__":
    sys.exit(main())
