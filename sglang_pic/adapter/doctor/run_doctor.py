"""The verb `sglang-pic doctor [MODEL] [-- server flags]`."""

from __future__ import annotations

import argparse
import sys

import msgspec

from sglang_pic.adapter.doctor.cards import CARDS
from sglang_pic.adapter.doctor.model_folder import check_model
from sglang_pic.arguments import collect_after_dashes
from sglang_pic.config import load_config

REFUSED = 1
PREFIX_ONLY = 3


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
        metavar="CARD",
        help=f"answer for a server with this card ({', '.join(sorted(CARDS))}); the machine need not have it",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    collect_after_dashes(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 when a server would splice, 1 when it would not start, 3 when it would be prefix only.

    Raises:
        ConfigError: the plugin's configuration is not allowed, there is no such model, or a flag is none of SGLang's.
        UnsupportedError: the model's configuration cannot be read.
    """
    # Before torch and SGLang are imported, which takes long.
    load_config()
    if args.model is not None:
        check_model(args.model)
    from sglang_pic.adapter.doctor.examine import examine
    from sglang_pic.adapter.doctor.findings import lines

    print("sglang-pic: reading SGLang's arguments, about 20 s", file=sys.stderr)
    findings = examine(args.model, args.server_args, card=args.card)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        print(*lines(findings), sep="\n")
    if findings.refused:
        return REFUSED
    return PREFIX_ONLY if findings.prefix_only else 0
