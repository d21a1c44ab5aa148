"""What several verbs have in common: flags of SGLang's server after `--`, secrets from the environment."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

API_KEY: Final = "SGLANG_PIC_API_KEY"
"""The environment variable of the server's `--api-key`; other users of a machine can read the words of a command."""
CACHE_SALT: Final = "SGLANG_PIC_CACHE_SALT"
"""The environment variable of a namespace's `cache_salt`."""


def secret(variable: str) -> str | None:
    """The value of an environment variable; None if it is unset or empty."""
    return os.environ.get(variable) or None


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
