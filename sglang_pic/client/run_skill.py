"""The verb `sglang-pic skill`: compiles, lists and drops skills on a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_pic.arguments import API_KEY, CACHE_SALT, api_key, is_http, secret
from sglang_pic.client import Pin, Receipt, Skills
from sglang_pic.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.epilog = (
        f"environment:\n  {API_KEY}     the server's --api-key\n"
        f"  {CACHE_SALT}  the secret part of the skills' namespace"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    shared.add_argument("--model", default="default", help="the model's name, for servers that ask for it")
    shared.add_argument("--extra-key", help="the namespace of the skills")
    shared.add_argument("--json", action="store_true", help="print the result as JSON")
    compiling = actions.add_parser("compile", parents=[shared], help="compile a text and keep it under a name")
    compiling.add_argument("name", metavar="NAME", help="1 to 128 of A-Z a-z 0-9 . _ -")
    compiling.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="the skill; several files are compiled in one pass"
    )
    compiling.add_argument("--behind", type=Path, metavar="FILE", help="the system prompt that the skill is used with")
    actions.add_parser("list", parents=[shared], help="list the server's skills, as it would release them")
    dropping = actions.add_parser("drop", parents=[shared], help="drop a skill")
    dropping.add_argument("name", metavar="NAME", help="as `list` shows it")


def run(args: argparse.Namespace) -> int:
    """Run the action, and print its skills, one a line.

    Returns:
        0, or 1 if there was nothing to drop.
    """
    if not is_http(args.base_url):
        raise ConfigError(f"--base-url={args.base_url!r}: must be like http://127.0.0.1:30000.")
    with Skills(
        args.base_url,
        model=args.model,
        api_key=api_key(),
        extra_key=args.extra_key,
        cache_salt=secret(CACHE_SALT),
    ) as skills:
        if args.action == "drop":
            is_dropped = skills.drop(args.name)
            said = "dropped" if is_dropped else "the server keeps no skill of this name here; `list` shows the names"
            print(f"{args.name}: {said}", file=sys.stderr)
            return 0 if is_dropped else 1
        if args.action == "list":
            found: Sequence[Pin | Receipt] = skills.list()
        else:
            behind = "" if args.behind is None else _read(args.behind)
            found = [skills.compile(args.name, [_read(path) for path in args.files], behind=behind)]
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        for skill in found:
            rank = getattr(skill, "dp_rank", None)
            print(f"{skill.name}  {skill.tokens} tokens  {skill.digest}{'' if rank is None else f'  rank {rank}'}")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({error}); name a text file.") from error
