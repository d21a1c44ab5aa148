"""Tokens by their source have one colour on every page and in every picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_pic.explain.page import ASSETS

ROOT = Path(__file__).parents[2]
NAMES = {"hit": "prefix", "run": "spliced", "cmp": "computed"}


def palettes() -> list[dict[str, str]]:
    """The light palette and the dark one."""
    text = (ASSETS / "palette.css").read_text(encoding="utf8")
    return [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", part)) for part in text.split("@media")]


@pytest.mark.parametrize("picture", ["changed_clock.svg", "how_it_works.svg"])
def test_pictures_of_the_first_page_have_the_colours_of_the_palette(picture: str) -> None:
    style = (ROOT / "sglang_pic" / picture).read_text(encoding="utf8").split("</style>")[0]
    for part, palette in zip(style.split("@media"), palettes(), strict=True):
        used = dict(re.findall(r"\.(hit|run|cmp) \{ fill: (#[0-9a-f]{6}) \}", part))
        assert used == {short: palette[name] for short, name in NAMES.items()}


def test_no_style_sheet_has_a_colour_of_its_own_for_a_source() -> None:
    sheets = [*ROOT.glob("sglang_pic/**/*.css"), *ROOT.glob("bench/pic_bench/**/*.css")]
    assert len(sheets) > 2
    for sheet in sheets:
        if sheet.name != "palette.css":
            assert not re.search(r"--(prefix|spliced|guarded|computed|chunk|run-0) *:", sheet.read_text("utf8")), sheet
