"""The result of `gpu_prefill` and how a terminal shows it: tables, break-even, notes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pic_bench.environment import Environment
from pic_bench.gpu.check import Check
from pic_bench.gpu.measure import PrefillTiming
from pic_bench.report.markdown import Table, markdown_table


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the benchmark writes with `--out`."""

    schema_version: int = 2
    environment: Environment
    device: str
    cuda: str | None
    threads: int
    dtype: str
    idle_watts: float | None
    """Of the board, with the context open and nothing running; never subtracted from an energy."""
    checks: list[Check]
    timings: list[PrefillTiming]
    left_out: list[str]
    failures: list[str]


def show(result: PrefillResult) -> str:
    """The whole result for a terminal, the failures last."""
    parts = []
    if result.checks:
        header = ["relative L2", "layers", *result.checks[0].errors]
        rows = [
            [f"{c.model} {c.backend}", str(c.layers), *(f"{error:.1e}" for error in c.errors.values())]
            for c in result.checks
        ]
        parts.append(markdown_table(Table(header, rows)))
    gaps, runs = ([timing for timing in result.timings if timing.item == item] for item in ("gaps", "runs"))
    parts += [markdown_table(_table(timings)) for timings in (gaps, runs) if timings]
    for model in dict.fromkeys(timing.model for timing in runs):
        least = break_even([timing for timing in runs if timing.model == model])
        parts.append(f"{model}: " + ("no length pays" if least is None else f"runs pay from {least:,} tokens on"))
    if result.idle_watts is not None:
        parts.append(f"Energy of the whole board by NVML; {result.idle_watts:.0f} W idle.")
    versions = [f"{name} {version}" for name, version in result.environment.versions.items()]
    parts.append(", ".join([result.device, result.dtype, *versions]))
    parts += [f"left out: {note}" for note in result.left_out] + [f"FAILED: {note}" for note in result.failures]
    return "\n\n".join(parts)


def break_even(timings: Sequence[PrefillTiming]) -> int | None:
    """The shortest run from which on every measured one is served sooner than computed; None if there is none."""
    least = None
    for timing in sorted(timings, key=lambda timing: timing.repeated_tokens, reverse=True):
        if timing.speedup <= 1:
            break
        least = timing.repeated_tokens
    return least


def _table(timings: Sequence[PrefillTiming]) -> Table:
    """Median milliseconds, and joules where they were measured."""
    header = ["ms", "prompt", "repeated", "runs", "computed", *timings[0].ways, "full / gaps", "joules full / gaps"]
    rows = [
        [
            *(f"{t.model} {t.backend}", f"{t.prompt_tokens:,}", f"{t.repeated_tokens:,}", str(t.runs)),
            *(f"{t.computed_tokens:,}", *(f"{way.p50_ms:.3f}" for way in t.ways.values()), f"{t.speedup:.2f} x"),
            " / ".join(f"{energy.joules_each:.2f}" for energy in t.energy.values()) or "-",
        ]
        for t in timings
    ]
    return Table(header, rows)
