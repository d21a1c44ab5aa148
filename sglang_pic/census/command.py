"""The verb `census`: its arguments, its progress bar, and what is printed when.

Owns argparse and stdout. Must not know how calls are served, nor how a table looks.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from pic_traces.errors import TraceError

from sglang_pic.errors import ConfigError, PicError

if TYPE_CHECKING:
    from sglang_pic.census.survey import Survey
    from sglang_pic.core import CoreConfig

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic census`."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="recorded sessions, request logs or a folder of them, sample:opendevin, gen:NAME?key=value&..., or a "
        "block trace",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder with a model's tokenizer and chat template (default: a stand-in that counts about right)",
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON instead of the table")
    parser.add_argument(
        "--upper-bound", action="store_true", help="count too what a search at every alignment would find (slower)"
    )
    parser.add_argument(
        "--shared-cache", action="store_true", help="one cache for all files (default: each begins with an empty one)"
    )
    parser.add_argument("--min-run", type=int, metavar="N", help="shortest run, in tokens (default: the server's)")
    parser.add_argument(
        "--min-spliced", type=int, metavar="N", help="tokens of it that must be left to splice (default: the server's)"
    )
    parser.add_argument(
        "--seam", type=int, metavar="N", help="tokens computed at the start of a run (default: the server's)"
    )
    parser.add_argument(
        "--tail",
        type=int,
        metavar="N",
        help="tokens at the end of a prompt that are computed unless a donor's context fits (default: the server's)",
    )
    parser.add_argument(
        "--foreign",
        type=int,
        metavar="N",
        help="most tokens that such a donor has seen and the prompt does not have (default: the server's)",
    )
    parser.add_argument(
        "--unseen",
        type=int,
        metavar="PERCENT",
        help="largest share of what stands before a run that such a donor has not seen (default: the server's)",
    )
    parser.add_argument("--limit-sessions", type=int, metavar="N", help="only the first N sessions of every file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Count, print, and return 0.

    Where something ends the count early, what was counted before is printed all the same.

    Raises:
        ConfigError: a value is not allowed.
        TraceError: a file or the tokenizer cannot be read.
        KeyboardInterrupt: the count was interrupted.
    """
    config = _config(args)
    survey = _survey(args, config)
    try:
        _count(survey, quiet=args.quiet)
    except (KeyboardInterrupt, PicError, TraceError):
        _print(survey, config, as_json=args.json)
        raise
    _print(survey, config, as_json=args.json)
    return 0


def _config(args: argparse.Namespace) -> CoreConfig:
    from sglang_pic.core import CoreConfig

    if args.limit_sessions is not None and args.limit_sessions < 1:
        raise ConfigError(f"--limit-sessions={args.limit_sessions!r}: must be 1 or more, or left out for all.")
    asked = {
        "min_run_tokens": args.min_run,
        "min_spliced_tokens": args.min_spliced,
        "seam_tokens": args.seam,
        "tail_tokens": args.tail,
        "foreign_tokens": args.foreign,
        "unseen_percent": args.unseen,
    }
    return CoreConfig(**{name: value for name, value in asked.items() if value is not None})


def _survey(args: argparse.Namespace, config: CoreConfig) -> Survey:
    from pic_traces.encode import load_encoder

    from sglang_pic.census.simulate import CacheScope
    from sglang_pic.census.survey import Survey
    from sglang_pic.census.windows import WindowSearch

    return Survey(
        args.files,
        encoder=load_encoder(args.tokenizer),
        config=config,
        scope=CacheScope.ALL if args.shared_cache else CacheScope.FILE,
        limit_sessions=args.limit_sessions,
        make_search=WindowSearch if args.upper_bound else None,
    )


def _count(survey: Survey, *, quiet: bool) -> None:
    from tqdm import tqdm

    # Read first, so that a bad line in the last file is reported now and not in an hour.
    num_calls = survey.prepare()
    is_hidden = quiet or not sys.stderr.isatty()
    with tqdm(total=num_calls, unit="call", file=sys.stderr, disable=is_hidden, dynamic_ncols=True) as bar:
        for file in survey.run():
            bar.set_description_str(file.rpartition("/")[2][-40:], refresh=False)
            bar.update()


def _print(survey: Survey, config: CoreConfig, *, as_json: bool) -> None:
    """Print what was counted, or nothing where nothing was."""
    from sglang_pic.census.table import render

    census = survey.result()
    if as_json:
        print(census.to_json())
    elif census.files:
        print(render(census, config))
