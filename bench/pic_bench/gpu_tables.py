"""Owns the result of `bench-prefill` and how it is shown: tables, break-even, and published figures beside them.

It must not know how anything was measured.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

import msgspec

from pic_bench.environment import Environment
from pic_bench.gpu_check import Check
from pic_bench.gpu_energy import Energy
from pic_bench.gpu_measure import GapTiming, RunTiming
from pic_bench.report.markdown import Table, markdown_table

__all__ = ["PrefillResult", "break_even", "show"]

# The port of arXiv:2605.05696 at moonmath-ai/sglang, on a server with DeepSeek-V2-Lite: TTFT of a miss over a hit.
_PORT_SPEEDUP: Final = {100: 0.98, 200: 1.01, 300: 1.32, 500: 1.23, 1_000: 1.50, 1_500: 1.68, 3_000: 2.72, 6_000: 5.24}
_PAPER_ENERGY: Final = (
    "Irminsul (arXiv:2605.05696) reports joules per prefill, miss / hit: 47.1 / 17.2 with a latent, 262.3 / 37.5 with "
    "grouped queries (Qwen3-32B); its hits are stock prefix hits, on its own GPU."
)


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the benchmark writes with `--out`."""

    schema_version: int = 1
    environment: Environment
    device: str
    cuda: str | None
    threads: int
    dtype: str
    experts: dict[str, str]
    """By model with experts, what computes them."""
    idle_watts: float | None
    """Of the board, with the context open and nothing running; in no energy is it taken off."""
    checks: list[Check]
    gaps: list[GapTiming]
    runs: list[RunTiming]
    left_out: list[str]
    failures: list[str]


def show(result: PrefillResult) -> str:
    """The whole of it for a terminal, the failures last."""
    parts = []
    if result.checks:
        parts.append(markdown_table(_check_table(result.checks)))
    if result.gaps:
        parts.append(markdown_table(_gap_table(result.gaps)))
    if result.runs:
        parts += [markdown_table(_run_table(result.runs)), "\n".join(_break_even_lines(result.runs))]
    if any(timing.miss_energy for timing in result.runs):
        idle = f"{result.idle_watts:.0f} W idle. " if result.idle_watts is not None else ""
        parts.append(f"Energy of the whole board by NVML; {idle}{_PAPER_ENERGY}")
    parts.append(
        f"{result.device}, {result.dtype}, "
        + ", ".join(f"{name} {version}" for name, version in result.environment.versions.items())
        + "".join(f"; experts of {model}: {way}" for model, way in result.experts.items())
    )
    parts += [f"left out: {note}" for note in result.left_out] + [f"FAILED: {note}" for note in result.failures]
    return "\n\n".join(parts)


def break_even(timings: list[RunTiming]) -> int | None:
    """The shortest measured run from which on every one is served sooner than computed; None if there is none."""
    least = None
    for timing in sorted(timings, key=lambda timing: timing.run_tokens, reverse=True):
        if timing.miss.p50_ms <= timing.hit.p50_ms:
            break
        least = timing.run_tokens
    return least


def _check_table(checks: list[Check]) -> Table:
    header = ["check", "layers", "attention", "prefix hit", "gaps", "KL prefix hit", "KL gaps", "wrong rows", "keys"]
    rows = [
        [_where(c.model, c.backend, c.path), str(c.layers)]
        + [f"{value:.1e}" for value in (c.attention, c.prefix_logits, c.gap_logits, c.prefix_kl, c.gap_kl)]
        + [f"{value:.1e}" for value in (c.wrong_logits, c.moved_keys)]
        for c in checks
    ]
    return Table(header, rows)


def _gap_table(timings: list[GapTiming]) -> Table:
    header = ["prefill, ms", "prompt", "spliced", "runs", "computed", "full", "prefix hit", "gaps", "splice"]
    header += ["full / gaps", "gaps / prefix hit"]
    rows = [
        [_where(t.model, t.backend, t.path), f"{t.prompt_tokens:,}", f"{t.share:.0%}", str(t.runs)]
        + [f"{t.computed_tokens:,}"]
        + [f"{each.p50_ms:.2f}" for each in (t.full, t.prefix, t.gap)]
        + [f"{t.splice.p50_ms:.3f}" if t.runs else "-"]
        + [f"{t.full.p50_ms / t.gap.p50_ms:.2f} x", f"{t.gap.p50_ms / t.prefix.p50_ms:.2f}"]
        for t in timings
    ]
    return Table(header, rows)


def _run_table(timings: list[RunTiming]) -> Table:
    header = ["TTFT, ms", "run", "prompt", "computed", "miss", "hit", "of it plan", "miss / hit", "the port's"]
    header += ["miss J", "hit J", "saved"]
    rows = []
    for t in timings:
        # The port was measured with the one model; its figures are no measure of another.
        port = _PORT_SPEEDUP.get(t.run_tokens) if t.model == "DeepSeek-V2-Lite" else None
        rows.append(
            [_where(t.model, t.backend, t.path), f"{t.run_tokens:,}", f"{t.prompt_tokens:,}", f"{t.computed_tokens:,}"]
            + [f"{each.p50_ms:.2f}" for each in (t.miss, t.hit)]
            + [
                f"{t.plan.p50_ms:.3f}",
                f"{t.miss.p50_ms / t.hit.p50_ms:.2f} x",
                "-" if port is None else f"{port:.2f} x",
            ]
            + _energy_cells(t.miss_energy, t.hit_energy)
        )
    return Table(header, rows)


def _energy_cells(miss: Energy | None, hit: Energy | None) -> list[str]:
    if miss is None or hit is None:
        return ["-", "-", "-"]
    return [f"{miss.joules_each:.2f}", f"{hit.joules_each:.2f}", f"{1 - hit.joules_each / miss.joules_each:.0%}"]


def _break_even_lines(timings: list[RunTiming]) -> list[str]:
    def where(timing: RunTiming) -> str:
        return _where(timing.model, timing.backend, timing.path)

    lines = []
    for name, group in groupby(sorted(timings, key=where), key=where):
        least = break_even(list(group))
        lines.append(f"{name}: " + ("no length pays" if least is None else f"pays from {least:,} tokens on"))
    return lines


def _where(model: str, backend: str, path: str) -> str:
    return " ".join(part for part in (model, backend, path) if part)
