"""Writes `MODELS.md` and `COMMANDS.md`: the models and recipes that would start.

`python -m pic_bench.pages.starts` (`make recipes`). NOTE: needs a process in which SGLang has not yet looked for its
platform, because it answers for other cards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import sglang_pic
from pic_bench.pages.commands import commands_page
from pic_bench.pages.families import models_page
from pic_bench.pages.recipes import recipes_section

PAGES: Final[dict[str, Callable[[], str]]] = {
    "MODELS.md": lambda: f"{models_page()}\n{recipes_section()}",
    "COMMANDS.md": commands_page,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages anew."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.pages.starts", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    for name, page in PAGES.items():
        file = Path(sglang_pic.__file__).with_name(name)
        file.write_text(page(), encoding="utf8")
        print(file, file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
