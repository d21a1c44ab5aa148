"""Owns what the reports say in words and tables, once for every output: headline, rows, definitions, limits.

It must not know Markdown or HTML: it returns plain strings.
"""

from __future__ import annotations

from typing import NamedTuple

from pic_bench.compare.run_folder import Run
from pic_bench.compare.summary import ArmSummary, Paired
from pic_bench.report.svg import count, percent, seconds, times

__all__ = [
    "DEFINITIONS",
    "Table",
    "Tile",
    "arms_table",
    "buckets_table",
    "comparison_table",
    "facts",
    "headline",
    "limits",
    "plural",
    "tiles",
]


class Table(NamedTuple):
    """A header and rows of equal length; the first column is text, the others are figures."""

    header: list[str]
    rows: list[list[str]]


class Tile(NamedTuple):
    """One figure of the report's head."""

    value: str
    label: str
    note: str


DEFINITIONS = (
    ("prefix hit", "prompt tokens whose KV the radix tree already held from position 0."),
    ("chunk hit", "prompt tokens whose KV was spliced from another position (the patched server only)."),
    ("computed", "prompt tokens that the model prefilled: prompt less prefix hits less chunk hits."),
    ("TTFT", "seconds from sending a request to its first streamed token, measured at the client."),
    ("paired request", "the same call of the same session, answered by both arms."),
    (
        "TTFT speedup",
        "TTFT of the baseline / TTFT of the arm for one paired request; the figure is the median of these ratios.",
    ),
    (
        "computed tokens ratio",
        "computed tokens of the arm / computed tokens of the baseline, summed over paired requests.",
    ),
    ("same first token", "share of paired requests whose greedy answers begin with the same token."),
    ("same whole answer", "share of paired requests whose whole greedy answers are equal, character by character."),
    (
        "KL of the first token",
        "KL(baseline || arm) in nats over the baseline's top-20 tokens and one bin for the rest; a token that the arm "
        "does not list counts with the arm's smallest listed probability, so the value is a lower bound.",
    ),
    (
        "noise floor",
        "the same figures between stock and stock with no prefix cache (or a second stock run): prefix hits and batch "
        "shapes alone change answers.",
    ),
)


def headline(run: Run) -> str:
    """The result in one or two sentences."""
    paired = run.summary.paired
    if paired is None:
        return "No stock and pic arm in this run: see the table of arms."
    if not paired.requests:
        return "No request was answered by both arms: there is nothing to compare."
    parts = [
        f"The patched server computed {percent(paired.computed_tokens_ratio)} of the tokens that stock SGLang computed "
        f"on the same {paired.requests} requests; median TTFT speedup {times(paired.ttft_speedup_p50)}"
    ]
    most = paired.at_least_chunk_hit_tokens[-1]
    if most.requests:
        parts.append(
            f", {times(most.ttft_speedup_p50)} on the {most.requests} requests with {most.low:,} or more "
            "chunk-hit tokens"
        )
    parts.append(f". Same first token in {percent(paired.first_token_agreement)}, same whole answer in ")
    parts.append(f"{percent(paired.output_agreement)} of them")
    floor = run.summary.floor
    if floor is None:
        parts.append(" (stock's own noise floor was not measured).")
    else:
        parts.append(
            f"; noise floor ({floor.arm} against {floor.baseline}): {percent(floor.first_token_agreement)} and "
            f"{percent(floor.output_agreement)}."
        )
    return "".join(parts)


def tiles(run: Run) -> list[Tile]:
    """The four figures a reader looks for first; empty where there is no stock and pic arm."""
    paired = run.summary.paired
    if paired is None:
        return []
    stock, pic, floor = run.summary.arms[paired.baseline], run.summary.arms[paired.arm], run.summary.floor
    most = paired.at_least_chunk_hit_tokens[-1]
    floor_note = "noise floor not measured" if floor is None else f"noise floor {percent(floor.first_token_agreement)}"
    return [
        Tile(
            percent(paired.computed_tokens_ratio),
            "of stock's tokens computed",
            f"{count(stock.computed_tokens)} → {count(pic.computed_tokens)} tokens",
        ),
        Tile(
            times(paired.ttft_speedup_p50),
            "median TTFT speedup",
            f"p50 {seconds(stock.ttft_s.p50)} → {seconds(pic.ttft_s.p50)}",
        ),
        Tile(
            times(most.ttft_speedup_p50),
            f"where ≥ {most.low:,} tokens are chunk hits",
            f"{most.requests} of {paired.requests} requests",
        ),
        Tile(percent(paired.first_token_agreement), "same first token", floor_note),
    ]


def arms_table(run: Run) -> Table:
    """Tokens by source and TTFT of every arm."""
    header = ["arm", "requests", "prompt tokens", "prefix hit", "chunk hit", "computed"]
    header += ["TTFT p50", "p90", "p99", "wall"]
    return Table(header, [_arm_row(name, arm) for name, arm in run.summary.arms.items()])


def comparison_table(run: Run) -> Table:
    """Every arm against the baseline: speed and agreement side by side."""
    comparisons = run.summary.comparisons
    baseline = comparisons[0].baseline if comparisons else "stock"
    lows = [bucket.low for bucket in comparisons[0].at_least_chunk_hit_tokens] if comparisons else []
    header = [f"against {baseline}", "pairs", "computed tokens", "TTFT speedup"]
    header += [f"≥ {low:,} chunk-hit" for low in lows]
    header += ["same first token", "same answer", "KL p50 / p99"]
    return Table(header, [_comparison_row(run, pair) for pair in comparisons])


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


def facts(run: Run) -> list[tuple[str, str]]:
    """What was run, on what."""
    summary, env = run.summary, run.environment
    trace, model = summary.trace, summary.model
    shape = [model.architecture, model.dtype, f"{model.num_layers} layers" if model.num_layers else None]
    if model.num_attention_heads and model.num_kv_heads:
        shape.append(f"{model.num_attention_heads} query and {model.num_kv_heads} KV heads")
    if model.context_len:
        shape.append(f"context {model.context_len:,}")
    if model.weights_bytes:
        shape.append(f"{model.weights_bytes / 1e6:,.0f} MB")
    digest = f", sha256 {trace.sha256[:16]}…" if trace.sha256 else ""
    dirty = " with local changes" if env.dirty else ""
    machine = (
        f"{env.cpu}, {env.num_cpus} CPUs, {env.memory_bytes / 2**30:.0f} GiB, load {env.load_1min:.1f} at the start"
    )
    return [
        ("trace", f"{trace.name}: {plural(trace.calls, 'call')} of {plural(trace.sessions, 'session')}{digest}"),
        ("model", ", ".join([model.name, *(part for part in shape if part)])),
        ("machine", f"{machine}; {'; '.join(env.gpus) if env.gpus else 'no GPU'}"),
        ("system", f"{env.system}, Python {env.python}"),
        ("versions", ", ".join(f"{name} {found}" for name, found in env.versions.items())),
        ("commit", f"{env.commit}{dirty}" if env.commit else "unknown"),
        ("started, ended", f"{summary.started_at}, {summary.finished_at}"),
        ("sessions side by side", str(run.config.sessions)),
        ("command", env.command),
    ]


def limits(run: Run) -> list[str]:
    """What was left out, what failed, and what these figures cannot say."""
    lines = []
    for name, arm in run.summary.arms.items():
        if arm.skipped:
            why = "; ".join(f"{n} x {reason}" for reason, n in arm.skipped_reasons.items())
            lines.append(f"{name}: {arm.skipped} calls were left out ({why}).")
        if arm.failed:
            why = "; ".join(f"{n} x {error}" for error, n in arm.errors.items())
            lines.append(f"{name}: {arm.failed} of {arm.requests} requests failed ({why}).")
    for pair in run.summary.comparisons:
        if pair.prompts_differ:
            lines.append(
                f"{pair.arm}: {pair.prompts_differ} calls had another prompt than in {pair.baseline}: not paired."
            )
    if not lines:
        lines.append("No call was left out and none failed.")
    lines.append(
        "Each arm ran once, on a fresh server, one after the other on the same machine: a difference of a few percent "
        "in time is within the noise of such a run."
        if len({arm.kind for arm in run.summary.arms.values()}) == len(run.summary.arms)
        else "Arms ran one after the other on fresh servers of the same machine; repeated arms show the spread."
    )
    if run.summary.floor is None:
        lines.append(
            "The noise floor was not measured: stock SGLang's prefix hits alone change some answers. "
            "Add `stock-cold` to --arms to measure it."
        )
    if any(arm.tools_flattened for arm in run.summary.arms.values()):
        lines.append("The model's chat template shows no tools: schemas, calls and results were sent as plain text.")
    lines.append(
        "Recorded completions are the history, so both arms saw the same prompts; calls of a session ran in order and "
        "as soon as the one before had ended, not at their recorded times."
    )
    return lines


def plural(number: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _arm_row(name: str, arm: ArmSummary) -> list[str]:
    total = arm.prompt_tokens or 1
    sources = [f"{n:,} ({n / total:.1%})" for n in (arm.prefix_hit_tokens, arm.chunk_hit_tokens, arm.computed_tokens)]
    sent = f"{arm.requests}" + (f" ({arm.failed} failed)" if arm.failed else "")
    times_ = [seconds(arm.ttft_s.p50), seconds(arm.ttft_s.p90), seconds(arm.ttft_s.p99), seconds(arm.wall_s)]
    return [name, sent, f"{arm.prompt_tokens:,}", *sources, *times_]


def _comparison_row(run: Run, pair: Paired) -> list[str]:
    name = f"{pair.arm} (noise floor)" if pair.arm == run.summary.noise_floor else pair.arm
    at_least = [
        f"{times(b.ttft_speedup_p50)} (n={b.requests})" if b.requests else "-" for b in pair.at_least_chunk_hit_tokens
    ]
    kl = pair.first_token_kl
    return [
        name,
        str(pair.requests),
        percent(pair.computed_tokens_ratio),
        times(pair.ttft_speedup_p50),
        *at_least,
        percent(pair.first_token_agreement),
        percent(pair.output_agreement),
        f"{kl.p50:.1e} / {kl.p99:.1e}" if kl else "-",
    ]
