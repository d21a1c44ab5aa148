"""The verb `sglang-pic doctor [MODEL] [-- server flags]`."""

from __future__ import annotations

import argparse
import sys

from sglang_pic.adapter.doctor.cards import CARDS
from sglang_pic.arguments import collect_after_dashes

REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic doctor`."""
    parser.usage = "sglang-pic doctor [MODEL] [--card CARD] [--json] [-- SERVER FLAG ...]"
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model folder or hub name, as for `sglang serve`; without it only installed versions are checked",
    )
    parser.add_argument(
        "--card",
        choices=sorted(CARDS),
        help="answer for a server with this card; the machine need not have the card",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(server_args=[])
    collect_after_dashes(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 when a server would start, 1 when it would be refused.

    Raises:
        ConfigError: the model cannot be read, or a flag is none of SGLang's.
    """
    from sglang_pic.adapter.doctor.examine import examine
    from sglang_pic.adapter.doctor.findings import render, to_json

    print("sglang-pic: reading SGLang's arguments, about 20 s", file=sys.stderr)
    findings = examine(args.model, args.server_args, card=args.card)
    print(to_json(findings) if args.json else render(findings), end="")
    return REFUSED if findings.refused else 0
