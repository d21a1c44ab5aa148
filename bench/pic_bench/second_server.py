"""What does a server that has served nothing gain from a store that another server has filled?

For each arm a first server answers prompts and ends; a second one starts on the same store of HiCache and answers the
same prompts behind other clocks. Stock SGLang finds there what stands before the clock, the plugin what follows as
well. Prompts are the last calls of sessions, cut to `--max-chars` of text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from pic_traces.source import TRACE_HELP, load

from pic_bench.compare.arms import build_arms
from pic_bench.compare.server import Server
from pic_bench.frame import Finding, Result, Study, at_least, result_of
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import percent, seconds
from pic_bench.report.stats import top_k_kl
from pic_bench.serving import Answer, generate, serving

_POOL = ("--max-total-tokens", "40000", "--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "3")
_QUIET_S = 5.0


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt on the second server of an arm."""

    seconds: float
    """Until its first token."""
    answer: Answer


class SecondServer(Result, frozen=True, kw_only=True):
    """The result file."""

    model: str
    trace: str
    seed: int
    stock: list[Call]
    pic: list[Call]
    kl: list[float]
    """Nats of the first token, of each prompt: KL(stock || pic) over stock's top 20 and one bin for the rest."""


STUDY = Study("second_server", __doc__, seed=0)
STUDY.add("--model", required=True, metavar="DIR", help="model folder, as for `sglang serve`")
STUDY.add("--trace", default="sample:opendevin", help=TRACE_HELP)
STUDY.add("--prompts", type=at_least(1), default=12, metavar="N", help="most sessions")
STUDY.add("--max-chars", type=at_least(1), default=10_000, metavar="N", help="text of a prompt")


@STUDY.measures
def main(args: argparse.Namespace, scratch: Path) -> Finding:
    """Measure both arms, one after the other."""
    found = {}
    for arm in build_arms(["stock", "pic"], server_args=_POOL, pic_config=None):
        store = scratch / f"store-{arm.name}"
        flags = ("--hicache-storage-backend", "file", "--file-storage-path", str(store))
        with serving(args.model, arm, scratch, flags=flags) as server:
            for text in _texts(args, clock=2 * args.seed):
                generate(server, text, max_new_tokens=1)
            _wait_until_written(store)
        with serving(args.model, arm, scratch, flags=flags) as server:
            for _ in range(3):
                generate(server, [*range(1000, 1512)], max_new_tokens=1)
            found[arm.name] = [_call(server, text) for text in _texts(args, clock=2 * args.seed + 1)]
    pairs = zip(found["stock"], found["pic"], strict=True)
    kl = [top_k_kl(stock.answer.first, pic.answer.first) or 0.0 for stock, pic in pairs]
    result = result_of(SecondServer, args, model=Path(args.model).name, kl=kl, **found)
    return Finding(result, _table(result))


def _texts(args: argparse.Namespace, clock: int) -> list[str]:
    """The last call of each session, behind a clock."""
    calls = [[*session.calls()][-1] for session in load(f"clock:{clock}@{args.trace}")][: args.prompts]
    return ["\n".join(str(message["content"]) for message in call.messages)[: args.max_chars] for call in calls]


def _wait_until_written(store: Path) -> None:
    """Until the first server has written nothing for seconds."""
    number, since = -1, time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        if (found := len([*store.glob("*")])) != number:
            number, since = found, time.monotonic()
        time.sleep(0.2)


def _call(server: Server, text: str) -> Call:
    started = time.perf_counter()
    answer = generate(server, text, max_new_tokens=1)
    return Call(seconds=time.perf_counter() - started, answer=answer)


def _table(result: SecondServer) -> Table:
    header = ["second server", "prompt tokens", "from the cache", "first token, median", "KL, mean / max", "same token"]
    rows = []
    for name, calls in (("stock", result.stock), ("with the plugin", result.pic)):
        answers = [call.answer for call in calls]
        prompt, cached = sum(each.prompt_tokens for each in answers), sum(each.cached_tokens for each in answers)
        rows.append([name, str(prompt), percent(cached / prompt), seconds(median(call.seconds for call in calls))])
        same = _share_equal([call.answer for call in result.stock], answers)
        kl = f"{sum(result.kl) / len(result.kl):.3f} / {max(result.kl):.3f}" if calls is result.pic else "-"
        rows[-1] += [kl, percent(same, 0)]
    return Table(header, rows)


def _share_equal(left: Sequence[Answer], right: Sequence[Answer]) -> float:
    return sum(a.ids == b.ids for a, b in zip(left, right, strict=True)) / len(left)


if __name__ == "__main__":
    sys.exit(main())
