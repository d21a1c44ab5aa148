"""The page: one HTML file with its style, its script and its data in it.

Owns the skeleton and how the payload is packed. Must not compute figures. Nothing that came from logs is in the markup
but the escaped title; everything else is in the packed payload, and the script makes text nodes of it. The page's own
policy forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from html import escape
from importlib.resources import files

import msgspec

from sglang_pic.explain.data import Payload

__all__ = ["html_page"]

# In this order: each names only what is above it.
_SCRIPTS = ("payload.js", "text.js", "paint.js", "card.js", "causes.js", "rows.js", "main.js")

_WORDS = (
    ("prefix hit", "tokens from the first to where the prompt leaves every earlier path: a prefix cache serves them"),
    ("chunk hit, recoverable", "tokens behind that place which stood elsewhere before, and are served by moving them"),
    ("run", "a span of chunk hits from one earlier call, at one shift"),
    ("donor", "the call that computed a run's tokens"),
    ("shift", "where a run stands less where it stood"),
    ("seam", "the first tokens of a run, computed again in their new context"),
    ("gap, computed", "what neither a prefix nor a run covers"),
    ("break", "the first token that differs from how the longest matching earlier path goes on"),
    ("tokens lost", "the chunk hits behind a break: there before, and yet computed again by a prefix cache"),
    ("in step again", "the first 16 tokens, or the end of the prompt, that both sides have in common after a break"),
)

_SKELETON = """\
<!doctype html>
<html lang="en" data-state="loading">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; \
script-src 'sha256-{script_hash}'; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<p class="eyebrow">sglang-pic explain</p>
<h1>{heading}</h1>
<p class="lead" id="headline">Unpacking …</p>
<p class="muted" id="notes"></p>
<noscript><p>This page is drawn by its own script, which is switched off. It needs no network.</p></noscript>
</header>
<div class="tiles" id="tiles"></div>
<div class="total" id="total" aria-hidden="true"></div>
<section aria-labelledby="causes-title">
<h2 id="causes-title">What broke the prefix</h2>
<p class="muted">Worst first, by tokens that were there before and yet are computed again.
What stood there is <span class="diff"><del>struck through</del></span>,
what stands there now is <span class="diff"><ins>marked</ins></span>.</p>
<div id="causes"></div>
</section>
<section id="calls" aria-labelledby="calls-title">
<h2 id="calls-title">Every call</h2>
<div class="keys" aria-hidden="true">
<span class="key"><i style="background:var(--prefix)"></i>prefix hit</span>
<span class="key"><i class="many"></i>run, coloured by donor, with its shift</span>
<span class="key"><i class="foreign"></i>donor in another session</span>
<span class="key"><i class="seam"></i>seam</span>
<span class="key"><i style="background:var(--computed)"></i>computed</span>
<span class="key"><i class="answer"></i>answer</span>
<span class="key"><i class="mark"></i>the prefix broke here (grey: nothing was lost)</span>
</div>
<p class="muted screen" style="font-size:.86rem">Point at a bar for its text; click a run to go to its donor. By
keyboard: <kbd>↑</kbd> <kbd>↓</kbd> calls, <kbd>←</kbd> <kbd>→</kbd> spans, <kbd>Enter</kbd> to the donor,
<kbd>b</kbd> back.</p>
<div class="tools">
<label>session, file or agent <input type="search" id="find" placeholder="contains …" autocomplete="off"></label>
<label>cause <select id="cause"></select></label>
<label>order <select id="sort"><option value="order">as in the logs</option>
<option value="lost">most tokens lost first</option></select></label>
<label>scale <select id="scale"><option value="one">one for all</option>
<option value="session">each session full width</option>
<option value="call">each call full width</option></select></label>
</div>
<div class="pinned">
<div class="status"><span id="shown" role="status" class="number"></span>
<span id="place" class="chip hidden"><span id="place-name"></span><button type="button" id="place-off">✕ all places\
</button></span>
<button type="button" id="reset" class="hidden">show all calls</button>
<button type="button" id="back" class="hidden"></button></div>
<div class="axis" aria-hidden="true"><small>call</small><div class="ticks" id="ticks"></div>\
<small>lost of tokens</small></div>
</div>
<p class="notice hidden" id="empty">No call is like this. Change the filters, or show all calls.</p>
<p class="muted paper-only" id="printed"></p>
<div class="bars" id="bars" role="listbox" tabindex="0" aria-label="calls"></div>
</section>
<section aria-labelledby="words-title">
<h2 id="words-title">Words</h2>
<dl>{words}</dl>
</section>
</main>
<div id="card" class="card hidden" role="status" aria-live="polite"></div>
<script type="application/octet-stream" id="payload">{payload}</script>
<script>{script}</script>
</body>
</html>
"""


def html_page(payload: Payload, title: str) -> str:
    """The whole page.

    Args:
        payload: what it shows.
        title: what the calls are of, e.g. the names of the files.
    """
    script = _script()
    # NOTE: filled in one pass, so that braces in the parts mean nothing.
    return _SKELETON.format(
        title=escape(f"What broke the prefix: {title}"),
        heading=escape(title),
        style=_asset("page.css"),
        words="".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in _WORDS),
        payload=_pack(payload),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _pack(payload: Payload) -> str:
    """Deflated JSON in base64: an alphabet that no markup can come out of."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(payload), 9)).decode()


def _script() -> str:
    body = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'\n(() => {{\n"use strict";\n{body}}})();\n'


def _asset(name: str) -> str:
    return (files("sglang_pic.explain") / "assets" / name).read_text(encoding="utf-8")
