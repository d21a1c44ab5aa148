"""The verb `explain`: its arguments, its progress bar, what is printed, and the file that is written.

Owns argparse, stdout and the page's file. Must not know how causes are told apart, nor how the page looks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pic_traces.source import TRACE_HELP, short_name

from sglang_pic.errors import ConfigError

if TYPE_CHECKING:
    from pic_traces import Session
    from pic_traces.encode import Encoder

    from sglang_pic.explain.data import PayloadBuilder

__all__ = ["add_arguments", "run"]

_NUM_CAUSES = 8
_PLACE_CHARS = 44
_NUM_TITLES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic explain`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help=TRACE_HELP)
    parser.add_argument("--out", required=True, metavar="PAGE", help="the HTML file to write")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder with a model's tokenizer and chat template (default: a stand-in that counts about right)",
    )
    parser.add_argument("--limit-sessions", type=int, metavar="N", help="only the first N sessions of every file")
    parser.add_argument("--limit-calls", type=int, metavar="N", help="only the first N calls in all")
    parser.add_argument("--force", action="store_true", help="replace the file that is there")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Write the page, print the worst causes, and return 0.

    Raises:
        ConfigError: a value is not allowed, or the page is there already.
        TraceError: a file or the tokenizer cannot be read, or has no text; nothing is written.
        KeyboardInterrupt: interrupted; nothing is written.
    """
    from pic_traces.encode import load_encoder

    from sglang_pic.explain.page import html_page

    out = _check(args)
    encoder = load_encoder(args.tokenizer)
    builder = _explain(args, encoder)
    payload = builder.build(encoder.name, is_exact=encoder.is_exact)
    _write(out, html_page(payload, _title(args.files)))
    print(_render(builder))
    print(f"page: {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def _check(args: argparse.Namespace) -> Path:
    for flag, value in (("--limit-sessions", args.limit_sessions), ("--limit-calls", args.limit_calls)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag}={value!r}: must be 1 or more, or left out for all.")
    for file in args.files:
        if args.files.count(file) > 1:
            raise ConfigError(f"FILE={file!r}: is named twice; the second time all of it would be a prefix hit.")
    out = Path(args.out).expanduser()
    if out.is_dir():
        raise ConfigError(f"--out={args.out!r}: is a folder; name the HTML file to write.")
    if not out.parent.is_dir():
        raise ConfigError(f"--out={args.out!r}: there is no folder {str(out.parent)!r}; make it first.")
    if out.exists() and not args.force:
        raise ConfigError(f"--out={args.out!r}: is there already; name another file, or replace it with --force.")
    return out


def _explain(args: argparse.Namespace, encoder: Encoder) -> PayloadBuilder:
    from tqdm import tqdm

    from sglang_pic.census.simulate import simulate
    from sglang_pic.explain.data import PayloadBuilder

    # Read first, so that a bad line in the last file is reported now and not at the end.
    num_calls = sum(session.num_calls for file in args.files for session in _sessions(file, args.limit_sessions))
    if args.limit_calls is not None:
        num_calls = min(num_calls, args.limit_calls)
    builder = PayloadBuilder(num_calls)
    sources = ((file, _sessions(file, args.limit_sessions)) for file in args.files)
    is_hidden = args.quiet or not sys.stderr.isatty()
    with tqdm(total=num_calls, unit="call", file=sys.stderr, disable=is_hidden, dynamic_ncols=True) as bar:
        for outcome in islice(simulate(sources, encoder), num_calls):
            builder.add(outcome)
            bar.update()
    return builder


def _sessions(file: str, limit: int | None) -> Iterator[Session]:
    from pic_traces import load

    return islice(load(file), limit)


def _title(files: Sequence[str]) -> str:
    names = [short_name(file) for file in files]
    more = f" and {len(names) - _NUM_TITLES} more" if len(names) > _NUM_TITLES else ""
    return ", ".join(names[:_NUM_TITLES]) + more


def _write(out: Path, page: str) -> None:
    """All of the page or none of it."""
    descriptor, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(page)
        # A temporary file is its owner's alone; a page has the rights of any file that is written here.
        part.chmod(0o666 & ~_umask())
        part.replace(out)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _render(builder: PayloadBuilder) -> str:
    totals = builder.totals
    parts = (("prefix hit", totals.prefix_tokens), ("recoverable", totals.chunk_tokens), ("new", totals.new_tokens))
    shares = ", ".join(f"{name} {_share(tokens, totals.prompt_tokens)}" for name, tokens in parts)
    lines = [f"{totals.num_calls:,} calls, {totals.prompt_tokens:,} prompt tokens: {shares}", ""]
    causes = [(cause, groups) for cause, groups in builder.grouping.ranked_causes() if groups[0].num_lost]
    if not causes and not totals.num_appending:
        return "\n".join([*lines, "No break cost tokens that could be recovered.", ""])
    rows = [("tokens", "calls", "what broke the prefix", "worst place")]
    rows += [
        (
            f"{sum(group.num_lost for group in groups):,}",
            f"{sum(group.num_calls for group in groups):,}",
            cause.label,
            _clip(groups[0].signature),
        )
        for cause, groups in causes[:_NUM_CAUSES]
    ]
    if totals.num_appending:
        rows.append(
            (f"{totals.appended_tokens:,}", f"{totals.num_appending:,}", "(nothing: appended text repeats)", "")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines += [
        f"{lost:>{widths[0]}}  {calls:>{widths[1]}}  {label:<{widths[2]}}  {place}".rstrip()
        for lost, calls, label, place in rows
    ]
    return "\n".join([*lines, ""])


def _share(tokens: int, total: int) -> str:
    return f"{tokens / total:.1%}" if total else "-"


def _clip(text: str) -> str:
    return text if len(text) <= _PLACE_CHARS else f"{text[: _PLACE_CHARS - 1]}…"
