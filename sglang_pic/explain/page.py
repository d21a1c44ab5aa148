"""The page: one HTML file that holds its style, its script and its data.

Text from logs reaches the markup only in the title, escaped. The rest is in the packed payload, from which the script
makes text nodes. The page's own policy forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

import msgspec
from jinja2 import Environment, PackageLoader

from sglang_pic.explain.cause import TEXTS
from sglang_pic.explain.data import Payload

# In this order: each uses only what is above it.
_SCRIPTS = ("payload.js", "text.js", "paint.js", "card.js", "causes.js", "rows.js", "main.js")


def html_page(payload: Payload, title: str) -> str:
    """The whole page.

    Args:
        payload: what it shows.
        title: what the calls are of, e.g. the names of the files.
    """
    assets = Environment(
        loader=PackageLoader("sglang_pic.explain", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    assert assets.loader is not None
    style, *scripts = (assets.loader.get_source(assets, name)[0] for name in ("page.css", *_SCRIPTS))
    script = f'\n(() => {{\n"use strict";\n{"".join(scripts)}}})();\n'
    return assets.get_template("page.html.j2").render(
        title=title,
        payload=payload,
        figures=payload.figures(),
        words=TEXTS["words"],
        percent=_percent,
        short=_short,
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # Deflated JSON in base64: no markup can be written in this alphabet.
        packed=base64.b64encode(zlib.compress(msgspec.json.encode(payload), 9)).decode(),
    )


def _short(count: int) -> str:
    for unit, least, size in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if count >= least:
            return f"{count / size:.{0 if count >= 100 * size else 1}f} {unit}"
    return f"{count:,}"


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else None
    return "-" if share is None else f"{share:.{2 if 0 < share < 0.1 else 1}f} %"
