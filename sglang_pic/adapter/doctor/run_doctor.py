"""The verb `sglang-pic doctor [MODEL] [-- server flags]`, and its flags that answer for more than one server."""

from __future__ import annotations

import argparse
import os
import sys
from unittest.mock import patch

from sglang_pic.adapter.doctor.cards import CARDS
from sglang_pic.adapter.doctor.model_folder import check_model
from sglang_pic.arguments import collect_after_dashes
from sglang_pic.config import load_config
from sglang_pic.errors import ConfigError

REFUSED = 1
PREFIX_ONLY = 3
_OF_FAMILIES = ("h100", "h200", "b200")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic doctor`."""
    parser.usage = (
        "sglang-pic doctor [MODEL] [--card CARD] [--env NAME=VALUE ...] [--json] [-- SERVER FLAG ...]\n"
        "       sglang-pic doctor --families [--card CARD,CARD...] [--json]\n"
        "       sglang-pic doctor --recipes | --commands [--json]\n"
        "       sglang-pic doctor --sglang WHEEL_OR_DIR [--json]"
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model folder or hub name, as for `sglang serve`; without it only installed versions are checked",
    )
    parser.add_argument(
        "--card",
        type=_cards,
        default=[],
        help=f"answer for a server with this card ({', '.join(sorted(CARDS))}); the machine need not have it",
    )
    parser.add_argument(
        "--env",
        action="append",
        type=_variable,
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the server's environment, such as SGLANG_PIC_CONFIG; once for each",
    )
    parser.add_argument(
        "--families",
        action="store_true",
        help=f"answer for the models that people serve, on several cards ({','.join(_OF_FAMILIES)})",
    )
    parser.add_argument(
        "--recipes", action="store_true", help="answer for the recipes that people have published, each with its flags"
    )
    parser.add_argument(
        "--commands",
        action="store_true",
        help="one command for each family, from a recipe or the cookbook",
    )
    parser.add_argument(
        "--sglang",
        metavar="WHEEL_OR_DIR",
        help="check what the plugin needs of an SGLang that is not installed: a wheel (`pip download --no-deps`), or a "
        "folder with its source",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(server_args=[])
    collect_after_dashes(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 when a server would splice, 1 when it would not start, 3 when it would be prefix only.

    Raises:
        ConfigError: the plugin's configuration is not allowed, there is no such model, or a flag is none of SGLang's.
        UnsupportedError: the model's configuration cannot be read.
    """
    if args.families:
        return _run_families(args)
    if args.recipes:
        return _run_recipes(args)
    if args.commands:
        return _run_commands(args)
    if args.sglang is not None:
        return _run_sglang(args)
    if len(args.card) > 1:
        raise ConfigError(f"--card {','.join(args.card)}: name one card, or add --families.")
    # Before torch and SGLang are imported, which takes long.
    with patch.dict(os.environ, dict(args.env)):
        load_config()
    if args.model is not None:
        check_model(args.model)
    from sglang_pic.adapter.doctor.examine import examine
    from sglang_pic.adapter.doctor.findings import render, to_json

    print("sglang-pic: reading SGLang's arguments, about 20 s", file=sys.stderr)
    findings = examine(args.model, args.server_args, card=next(iter(args.card), None), variables=dict(args.env))
    print(to_json(findings) if args.json else render(findings), end="")
    if findings.refused:
        return REFUSED
    return PREFIX_ONLY if findings.prefix_only else 0


def _run_families(args: argparse.Namespace) -> int:
    if args.model is not None or args.server_args or args.env:
        raise ConfigError("--families: takes no MODEL, --env or server flags; each family has its own.")
    from sglang_pic.adapter.doctor.families import render, survey
    from sglang_pic.adapter.doctor.findings import to_json

    print("sglang-pic: reading SGLang's arguments, about 40 s", file=sys.stderr)
    found = survey(args.card or _OF_FAMILIES)
    print(to_json(found) if args.json else render(found), end="")
    return 0


def _run_recipes(args: argparse.Namespace) -> int:
    _check_alone(args, "--recipes", "each recipe has its own")
    from sglang_pic.adapter.doctor.findings import to_json
    from sglang_pic.adapter.doctor.recipes import render_recipes, survey_recipes

    print("sglang-pic: reading SGLang's arguments, about a minute", file=sys.stderr)
    found = survey_recipes()
    print(to_json(found) if args.json else render_recipes(found), end="")
    return 0


def _run_commands(args: argparse.Namespace) -> int:
    _check_alone(args, "--commands", "each command has its own")
    from sglang_pic.adapter.doctor.commands import choose_commands, render_commands
    from sglang_pic.adapter.doctor.findings import to_json

    print("sglang-pic: reading SGLang's arguments, about a minute", file=sys.stderr)
    found = choose_commands()
    print(to_json(found) if args.json else render_commands(found), end="")
    return 0


def _run_sglang(args: argparse.Namespace) -> int:
    _check_alone(args, "--sglang", "only source is read")
    from sglang_pic.adapter.doctor.findings import to_json
    from sglang_pic.adapter.doctor.other_sglang import check_other, render_other

    found = check_other(args.sglang)
    print(to_json(found) if args.json else render_other(found), end="")
    return 0 if found.starts else REFUSED


def _check_alone(args: argparse.Namespace, flag: str, why: str) -> None:
    if args.model is not None or args.server_args or args.env or args.card:
        raise ConfigError(f"{flag}: takes no MODEL, --card, --env or server flags; {why}.")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name, value


def _cards(text: str) -> list[str]:
    cards = text.split(",")
    unknown = [card for card in cards if card not in CARDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(sorted(CARDS))}")
    return cards
