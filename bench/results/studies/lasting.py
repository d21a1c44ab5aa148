"""Does the gain last? Windows and trend of a paced replay, and a picture of them beside those of simulated time.

sglang-pic replay TRACE --spread-s 3600 --pause-s 15 --out REPLAY ...   on a server with a small pool
sglang-pic census TRACE --hours 6 --json > CENSUS
python -m pic_bench.lasting --replay REPLAY --census CENSUS --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pic_bench.frame import Finding, Study
from pic_bench.out_folder import read_json, write_json
from pic_bench.report.figures import colour, drawing, place
from pic_traces.errors import TraceError
from pic_traces.records import RequestRecord, Status, load_records
from pic_traces.replay.options import ReplayOptions

from sglang_pic.census.lasting import Lasting, Trends, Window, fit_trends

_WIDTH, _HEIGHT = 720, 340


class LastingReplay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replay by windows of time; calls behind the last window are left out."""

    schema_version: int = 1
    spread_s: float
    pause_s: float
    seed: int
    window_s: float
    calls: int
    """Of all windows; completed ones."""
    failed: int
    skipped: int
    """Too long for the model."""
    windows: list[Window]
    warmup_windows: int
    trends: Trends


def summarize(
    records: Sequence[RequestRecord], options: ReplayOptions, *, window_s: float, warmup_windows: int
) -> LastingReplay:
    """The windows of a replay, as many as its sessions are spread over, and the trend of those after the warm-up.

    Raises:
        TraceError: the replay had no pace, or the server reported no cache hits.
    """
    if options.spread_s is None:
        raise TraceError("the replay had no --spread-s: all its sessions started at once.")
    windows = [Window() for _ in range(round(options.spread_s / window_s))]
    counted: dict[Status, int] = dict.fromkeys(Status, 0)
    for record in records:
        number = int(record.scheduled_at / window_s)
        if record.warmup or number >= len(windows):
            continue
        counted[record.status] += 1
        if record.status is not Status.OK:
            continue
        if record.prompt_tokens is None or record.prefix_hit_tokens is None or record.chunk_hit_tokens is None:
            raise TraceError("the server reported no cache hits: start it with --enable-cache-report.")
        window = windows[number]
        window.calls += 1
        window.prompt_tokens += record.prompt_tokens
        window.prefix_tokens += record.prefix_hit_tokens
        window.chunk_tokens += record.chunk_hit_tokens
    return LastingReplay(
        spread_s=options.spread_s,
        pause_s=options.pause_s,
        seed=options.pace_seed,
        window_s=window_s,
        calls=counted[Status.OK],
        failed=counted[Status.FAILED] + counted[Status.INTERRUPTED],
        skipped=counted[Status.SKIPPED],
        windows=windows,
        warmup_windows=warmup_windows,
        trends=fit_trends(windows[warmup_windows:], window_s),
    )


def draw(told: Sequence[tuple[str, LastingReplay | Lasting]]) -> str:
    """An SVG with a panel for each run: the recovered share, window by window, and its straight line."""
    with drawing("Recovered share by window of ten minutes", _WIDTH, _HEIGHT) as (drawn, figure):
        share = _WIDTH / len(told)
        for number, (title, run) in enumerate(told):
            left, right = number * share + 50, _WIDTH - (number + 1) * share + 8
            axes: Any = place(figure, left=left, top=30, right=right, bottom=44)
            hours = [(at + 0.5) * run.window_s / 3600 for at in range(len(run.windows))]
            recovered = [100 * w.chunk_tokens / max(1, w.prompt_tokens - w.prefix_tokens) for w in run.windows]
            bars = axes.bar(hours, recovered, width=0.85 * run.window_s / 3600, color=colour("line-1"))
            for at, bar in enumerate(bars):
                bar.set_alpha(0.4 if at < run.warmup_windows else 1.0)
            trend = run.trends.recovered
            if trend is not None:
                rest = hours[run.warmup_windows :]
                middle, mean = sum(rest) / len(rest), 50 * (trend.first_half + trend.second_half)
                ends = [mean + 100 * trend.slope_per_hour.value * (at - middle) for at in (rest[0], rest[-1])]
                axes.plot([rest[0], rest[-1]], ends, color=colour("line-2"), linewidth=2)
            axes.set(title=title, xlabel="hours", ylim=(0, 65))
            if number == 0:
                axes.set_ylabel("% of the prefix cache's misses")
    return drawn.standalone(
        "Does the gain last?", "What chunks recover of the prefix cache's misses, by ten minutes; pale: the pool fills"
    )


STUDY = Study("lasting", __doc__, has_out=False)
STUDY.add("--replay", type=Path, required=True, metavar="DIR", help="run folder of a paced replay")
STUDY.add("--census", type=Path, required=True, metavar="FILE", help="of `census --hours --json`")
STUDY.add("--window-s", type=float, default=600.0, metavar="S", help="length of the replay's windows")
STUDY.add("--warmup-windows", type=int, default=1, metavar="N", help="windows of the replay that do not count")
STUDY.add("--out", type=Path, required=True, metavar="DIR", help="folder to write")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> Finding:
    """Write DIR/replay.json, census.json and lasting.svg; 1: a file cannot be read, 3: a recovered share falls."""
    options = read_json(args.replay / "config.json", ReplayOptions, "the config.json of a replay")
    records = load_records(args.replay)
    replay = summarize(records, options, window_s=args.window_s, warmup_windows=args.warmup_windows)
    census = read_json(args.census, Lasting, "what `census --hours --json` prints")
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "replay.json", replay)
    write_json(args.out / "census.json", census)
    runs: list[tuple[str, LastingReplay | Lasting]] = [
        (f"{census.hours:g} h of simulated time", census),
        (f"{replay.spread_s / 3600:g} h on a server", replay),
    ]
    (args.out / "lasting.svg").write_text(draw(runs), "utf8")
    # What an unlimited cache serves grows with all that it ever saw, so a pool's part of it may fall.
    trends = (census.trends.recovered, replay.trends.recovered)
    falls = any(trend is not None and trend.decays for trend in trends)
    return Finding(None, f"written to {args.out}; a recovered share {'falls' if falls else 'does not fall'}", 3 * falls)


if __name__ == "__main__":
    sys.exit(main())
