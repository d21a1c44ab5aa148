"""The page: one HTML file that holds its style, its script and its data.

Text from logs reaches the markup only in the title, escaped. The rest is in the packed payload, from which the script
makes text nodes. The page's own policy forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence

import msgspec
from jinja2 import ChoiceLoader, Environment, PackageLoader

from sglang_pic.explain.cause import TEXTS
from sglang_pic.explain.data import Figures, Payload

# In this order: each uses only what is above it.
_SCRIPTS = ("payload.js", "text.js", "paint.js", "card.js", "causes.js", "rows.js", "main.js")


def html_page(payload: Payload, figures: Figures, title: str) -> str:
    """The whole page.

    Args:
        payload: what it shows.
        figures: their sums.
        title: what the calls are of, e.g. the names of the files.
    """
    return self_contained(
        ("sglang_pic.explain",),
        "page.html.j2",
        ("page.css",),
        _SCRIPTS,
        payload,
        title=title,
        payload=payload,
        figures=figures,
        words=TEXTS["words"],
        percent=_percent,
        short=_short,
    )


def self_contained(
    packages: Sequence[str],
    template: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: msgspec.Struct,
    **values: object,
) -> str:
    """A page that needs no other file and may ask for none, from assets of the packages' folders `assets`.

    Args:
        packages: where an asset is looked for, in this order.
        template: extends `base.html.j2`, and sees `values`.
        styles: files of style, in their order.
        scripts: files of one script, each using only what is in those before it.
        data: what `readPayload` of payload.js gives the script.
    """
    assets = Environment(
        loader=ChoiceLoader([PackageLoader(package, "assets") for package in packages]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loader = assets.loader
    assert loader is not None
    style, source = ("".join(loader.get_source(assets, name)[0] for name in names) for names in (styles, scripts))
    script = f'\n(() => {{\n"use strict";\n{source}}})();\n'
    return assets.get_template(template).render(
        **values,
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # Deflated JSON in base64: no markup can be written in this alphabet.
        packed=base64.b64encode(zlib.compress(msgspec.json.encode(data), 9)).decode(),
    )


def _short(count: int) -> str:
    for unit, least, size in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if count >= least:
            return f"{count / size:.{0 if count >= 100 * size else 1}f} {unit}"
    return f"{count:,}"


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else None
    return "-" if share is None else f"{share:.{2 if 0 < share < 0.1 else 1}f} %"
