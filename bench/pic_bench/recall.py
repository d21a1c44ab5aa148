"""How much of what repeats the cache recovers, on recorded sessions and generated workloads, beside the upper bound.

The bound is a search at every alignment by an unlimited cache (windows of 64 tokens); seams and sinks count as
computed. A set fails below `LEAST_RECOVERED` of the bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from pic_traces.encode import load_encoder
from pic_traces.generate import WORKLOADS, partition_shift
from pic_traces.source import short_name
from tqdm import tqdm

from pic_bench.frame import Finding, Result, Study, result_of
from pic_bench.report.markdown import Table
from sglang_pic.census.survey import Survey
from sglang_pic.census.windows import WindowSearch
from sglang_pic.core import MOST_REUSE, CoreConfig
from sglang_pic.errors import BenchError, ConfigError

LEAST_RECOVERED: Final = 0.97
"""Of the tokens that a search at every alignment finds. Below it a set fails."""
_LEAST_TOKENS: Final = 1_000
"""Of fewer repeated tokens no share is asked for: the control has next to none."""


class Recall(msgspec.Struct, frozen=True, kw_only=True):
    """One set. Earlier records have times and memory, too."""

    name: str
    sessions: int
    calls: int
    prompt_tokens: int
    prefix_tokens: int
    repeated_tokens: int
    """In a window of 64 tokens behind the prefix that was seen before: the upper bound."""
    border_tokens: int
    """Further ones, in such windows that begin in the prefix."""
    recovered_tokens: int
    """Spliced. More than the bound where runs shorter than its window pay: parts of longer equal spans."""
    runs: int

    @property
    def share(self) -> float:
        """Of the bound; 1 where nothing repeats."""
        return self.recovered_tokens / self.repeated_tokens if self.repeated_tokens else 1.0

    @property
    def failed(self) -> bool:
        """Whether too little was recovered."""
        return self.repeated_tokens >= _LEAST_TOKENS and self.share < LEAST_RECOVERED


class RecallResult(Result, frozen=True, kw_only=True):
    """The result file."""

    tokenizer: str
    config: CoreConfig
    sets: list[Recall]


STUDY = Study("recall", __doc__)
STUDY.add("traces", nargs="*", metavar="TRACE", help="sessions or gen:NAME?... (default: all that needs no files)")
STUDY.add("--tokenizer", metavar="DIR", help="folder with tokenizer and chat template (default: a stand-in)")
STUDY.add(
    "--core",
    metavar="JSON",
    help="instead of the settings for most reuse, e.g. '{\"seam_tokens\": 1}'; the others are the server's",
)
STUDY.add("--quiet", action="store_true", help="no progress bars")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> Finding:
    """Measure every set; 1 if a set failed."""
    try:
        config = msgspec.json.decode(args.core, type=CoreConfig) if args.core else MOST_REUSE
    except (msgspec.DecodeError, ConfigError) as error:
        STUDY.parser.error(f"--core={args.core!r}: {error}")
    traces = args.traces or [
        "sample:opendevin",
        *partition_shift(),
        *(f"gen:{n}" for n in WORKLOADS if n != "agent_meta"),
    ]
    sets = []
    for trace in traces:
        sets.append(_measure(trace, args.tokenizer, config, args.quiet))
        print(f"{len(sets)} of {len(traces)} measured: {sets[-1].name}", file=sys.stderr)
    result = result_of(RecallResult, args, tokenizer=args.tokenizer or "stand-in", config=config, sets=sets)
    failed = [found.name for found in sets if found.failed]
    if failed:
        print(f"below {LEAST_RECOVERED:.0%} of the bound: {', '.join(failed)}", file=sys.stderr)
    return Finding(result, _table(sets), 1 if failed else 0)


def _measure(trace: str, tokenizer: str | None, config: CoreConfig, quiet: bool) -> Recall:
    survey = Survey([trace], encoder=load_encoder(tokenizer), config=config, make_search=WindowSearch)
    num_calls = survey.prepare()
    for _ in tqdm(survey.run(), trace[-30:], num_calls, unit="call", file=sys.stderr, disable=quiet, leave=False):
        pass
    counts = survey.result().total
    bound = counts.detail.upper_bound
    if bound is None or counts.chunk_tokens is None or counts.runs is None:
        raise BenchError(f"{trace}: tells nothing about repeats; recorded sessions with text are needed.")
    return Recall(
        name=short_name(trace),
        sessions=counts.sessions,
        calls=counts.calls,
        prompt_tokens=counts.prompt_tokens,
        prefix_tokens=counts.prefix_tokens,
        repeated_tokens=bound.tokens_behind,
        border_tokens=bound.tokens - bound.tokens_behind,
        recovered_tokens=counts.chunk_tokens,
        runs=counts.runs,
    )


def _table(sets: Sequence[Recall]) -> Table:
    header = ["set", "calls", "prompt tokens", "prefix", "repeated behind it", "recovered", "of what repeats"]
    rows = []
    for found in sets:
        shares = ["-", "-"]
        if found.repeated_tokens >= _LEAST_TOKENS:
            with_border = found.recovered_tokens / (found.repeated_tokens + found.border_tokens)
            shares = [f"{found.share:.1%}{' FAILED' if found.failed else ''}", f"{with_border:.1%}"]
        rows.append(
            [
                *(found.name, f"{found.calls:,}", f"{found.prompt_tokens:,}"),
                f"{found.prefix_tokens / found.prompt_tokens:.1%}",
                f"{found.repeated_tokens:,} ({found.repeated_tokens / found.prompt_tokens:.2%})",
                *(f"{found.recovered_tokens:,}", *shares, f"{found.runs / found.calls:.2f}"),
            ]
        )
    return Table([*header, "with the border", "runs a call"], rows)


if __name__ == "__main__":
    sys.exit(main())
