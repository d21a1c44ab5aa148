"""What verbs that take flags of SGLang's server have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def collect_after_dashes(parser: argparse.ArgumentParser) -> None:
    """Put whatever follows a lone `--` into `server_args`, unread.

    NOTE: argparse cannot say this: a positional of any number that follows another one is matched, with nothing, as
    soon as the first is seen (Python 3.11), and the words after `--` are then an error.
    """
    parse = parser.parse_known_args

    def parse_known_args(  # type: ignore[no-untyped-def]
        args: Sequence[str] | None = None, namespace=None
    ):
        words = list(sys.argv[1:] if args is None else args)
        cut = words.index("--") if "--" in words else len(words)
        known, unknown = parse(words[:cut], namespace)
        known.server_args = words[cut + 1 :]
        return known, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]
