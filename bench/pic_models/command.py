"""The verb `sglang-pic model NAME DIR`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    from pic_models import MODEL_NAMES

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "models:\n" + "\n".join(f"  {name:<15} {text}" for name, text in sorted(MODEL_NAMES.items()))
    parser.add_argument(
        "name", metavar="NAME", choices=sorted(MODEL_NAMES), help="one of: " + ", ".join(sorted(MODEL_NAMES))
    )
    parser.add_argument("target", metavar="DIR", type=Path, help="folder of the checkpoint; made once, then kept")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Prepare the model; prints the folder on standard output, progress on standard error.

    Returns:
        0; errors of the project are raised for the caller to print.
    """
    from pic_models import prepare

    path = prepare(args.name, args.target, progress=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps({"name": args.name, "path": str(path)}) if args.json else path)
    return 0
