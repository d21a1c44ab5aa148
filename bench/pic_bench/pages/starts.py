"""Writes `MODELS.md`: the models and public recipes that would start.

`python -m pic_bench.pages.starts` (`make recipes`). NOTE: needs a process in which SGLang has not yet looked for its
platform, because it answers for other cards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import sglang_pic
from pic_bench.pages.families import models_page
from pic_bench.pages.recipes import recipes_section

FILE: Final = Path(sglang_pic.__file__).with_name("MODELS.md")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page anew."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.pages.starts", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    FILE.write_text(page(), encoding="utf8")
    print(FILE, file=sys.stderr)
    return 0


def page() -> str:
    """The page; minutes."""
    return f"{models_page()}\n{recipes_section()}"


if __name__ == "__main__":
    raise SystemExit(main())
