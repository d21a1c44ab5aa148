"""The tables of a comparison, as plain strings."""

from __future__ import annotations

from pic_bench.compare.summary import ArmSummary, Paired, Summary
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import percent, seconds, times


def arms_table(summary: Summary) -> Table:
    """Tokens by source and TTFT of every arm."""
    header = ["arm", "requests", "prompt tokens", "prefix hit", "chunk hit", "computed"]
    header += ["TTFT p50", "p90", "p99", "wall"]
    return Table(header, [_arm_row(name, arm) for name, arm in summary.arms.items()])


def comparison_table(summary: Summary) -> Table:
    """Every arm against the baseline: speed and agreement side by side."""
    comparisons = summary.comparisons
    baseline = comparisons[0].baseline if comparisons else "stock"
    lows = [bucket.low for bucket in comparisons[0].at_least_chunk_hit_tokens] if comparisons else []
    header = [f"against {baseline}", "pairs", "computed tokens", "TTFT speedup"]
    header += [f"≥ {low:,} chunk-hit" for low in lows]
    header += ["same first token", "same answer", "KL p50 / p99"]
    return Table(header, [_comparison_row(summary, pair) for pair in comparisons])


def buckets_table(paired: Paired) -> Table:
    """TTFT by chunk-hit tokens."""
    rows = []
    for bucket in (*paired.by_chunk_hit_tokens, *paired.at_least_chunk_hit_tokens):
        if bucket.high is None:
            label = f"≥ {bucket.low:,}"
        else:
            label = "none" if bucket.low == 0 else f"{bucket.low:,} to {bucket.high - 1:,}"
        base, arm = seconds(bucket.baseline_ttft_p50_s), seconds(bucket.ttft_p50_s)
        rows.append([label, str(bucket.requests), base, arm, times(bucket.ttft_speedup_p50)])
    rows = [row for i, row in enumerate(rows) if row not in rows[:i]]
    return Table(["chunk-hit tokens", "pairs", f"{paired.baseline} p50", f"{paired.arm} p50", "TTFT speedup"], rows)


def counters_table(summary: Summary) -> Table:
    """The plugin's counters of every arm that has some."""
    arms = summary.arms.items()
    rows = [[key, name, f"{value:g}"] for name, arm in arms for key, value in arm.pic_counters.items()]
    return Table(["counter", "arm", "value"], rows)


def kl_percentiles(pair: Paired) -> str:
    """Median and 99th percentile of the first token's KL."""
    kl = pair.first_token_kl
    return f"{kl.p50:.1e} / {kl.p99:.1e}" if kl else "-"


def _arm_row(name: str, arm: ArmSummary) -> list[str]:
    total = arm.prompt_tokens or 1
    sources = [f"{n:,} ({n / total:.1%})" for n in (arm.prefix_hit_tokens, arm.chunk_hit_tokens, arm.computed_tokens)]
    sent = f"{arm.requests}" + (f" ({arm.failed} failed)" if arm.failed else "")
    times_ = [seconds(arm.ttft_s.p50), seconds(arm.ttft_s.p90), seconds(arm.ttft_s.p99), seconds(arm.wall_s)]
    return [name, sent, f"{arm.prompt_tokens:,}", *sources, *times_]


def _comparison_row(summary: Summary, pair: Paired) -> list[str]:
    name = f"{pair.arm} (noise floor)" if pair.arm == summary.noise_floor else pair.arm
    at_least = [
        f"{times(b.ttft_speedup_p50)} (n={b.requests})" if b.requests else "-" for b in pair.at_least_chunk_hit_tokens
    ]
    return [
        name,
        str(pair.requests),
        percent(pair.computed_tokens_ratio),
        times(pair.ttft_speedup_p50),
        *at_least,
        percent(pair.first_token_agreement),
        percent(pair.output_agreement),
        kl_percentiles(pair),
    ]
