"""Writes the companion page from the records in bench/results: `python -m pic_bench.companion --out PAGE`.

No number on it is new. Where the page draws which tokens were spliced, today's planner has planned the recorded prompt
again, and the drawing is shown only if it has as many tokens of each kind as the server had.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pic_bench.companion.calls import Scene, read_scenes
from pic_bench.companion.dials import Dial, read_dials
from pic_bench.companion.edits import Edits, read_edits
from sglang_pic.explain.page import self_contained
from sglang_pic.explain.snippets import SnippetPool

_PACKAGES = ("pic_bench.companion", "sglang_pic.explain")
_SCRIPTS = ("payload.js", "text.js", "parts.js", "calls.js", "dials.js", "edits.js", "companion.js")
_MAX_TEXT_BYTES = 4_000_000


class Payload(msgspec.Struct, frozen=True, rename="camel"):
    """What the page's script reads. Texts are numbers in `texts`."""

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
    page = html_page(read_payload(args.tokenizer))
    args.out.write_text(page, encoding="utf8")
    print(f"page: {args.out} ({len(page.encode()) / 1e6:.2f} MB)", file=sys.stderr)
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
    """The whole page."""
    return self_contained(_PACKAGES, "companion.html.j2", ("page.css", "companion.css"), _SCRIPTS, payload)


if __name__ == "__main__":
    sys.exit(main())
