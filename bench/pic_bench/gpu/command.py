"""The work of `gpu_prefill`: a model is checked, then its gaps and runs are timed as far as the time goes."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar

import torch

from pic_bench.frame import Finding, Result, Study, at_least, keep, result_of
from pic_bench.gpu.clocks import Deadline, JouleCounter, device_name, measure_energy, open_counter
from pic_bench.gpu.measure import Bench, Check, PrefillTiming, check_model, time_gaps, time_runs
from pic_bench.gpu.model import MODELS, TINY, TORCH, AttentionBackend
from pic_bench.report.markdown import Table, markdown_table
from sglang_pic.errors import BenchError, UnsupportedError

T = TypeVar("T")
_ITEMS: Final = ("gaps", "runs")
_BACKENDS: Final = ("triton", "torch")
_CHECK_TOKENS: Final = 1_024
_SPARE_SLOTS: Final = 256


class PrefillResult(Result, frozen=True, kw_only=True):
    """The result file."""

    schema_version: int = 2
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


_HELP = """\
Gap prefill against full prefill, and time and energy by run length, with random weights of published dimensions.

A prompt is computed in full, behind an exact prefix hit, and as gaps around spliced runs; then requests with one run.
Every model is checked first, and what is wrong is not timed.
"""
_IS_GPU = torch.cuda.is_available()
STUDY = Study("gpu_prefill", _HELP, seed=1)
STUDY.add("--item", nargs="+", choices=_ITEMS, default=list(_ITEMS), help="what to time")
STUDY.add(
    "--model", nargs="+", choices=[*MODELS], default=[name for name in MODELS if name not in TINY], help="dimensions"
)
STUDY.add("--backend", choices=_BACKENDS, default="triton" if _IS_GPU else "torch", help="who attends")
STUDY.add("--device", default="cuda" if _IS_GPU else "cpu", help="where to run")
STUDY.add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of weights and rows")
STUDY.add("--prompt", nargs="+", type=at_least(1), default=[2_048, 8_192, 32_768], help="tokens, for gaps")
STUDY.add("--share", nargs="+", type=float, default=[0.0, 0.5, 0.9, 0.99], help="of a prompt that is spliced, for gaps")
STUDY.add("--runs", nargs="+", type=at_least(1), default=[1, 8, 32], help="of a prompt, for gaps")
STUDY.add(
    "--length",
    nargs="+",
    type=at_least(1),
    default=[100, 200, 300, 500, 1_000, 1_500, 3_000, 6_000],
    help="tokens of the one run, for runs",
)
STUDY.add("--index-tokens", type=at_least(0), default=1_600_000, help="other text in the chunk index, for runs")
STUDY.add("--repeats", type=at_least(1), default=15, help="timed calls of each way; one that takes long gets three")
STUDY.add("--energy-s", type=at_least(0.0), default=3.0, help="seconds of repeats per joule figure; 0: no energy")
STUDY.add("--budget-s", type=float, default=540.0, help="seconds for all; cases that do not fit are left out and named")


@STUDY.measures
def run(args: argparse.Namespace, _logs: Path) -> Finding:
    """Measure until the time is over; 1 where a check failed."""
    if not all(0 <= share < 1 for share in args.share):
        STUDY.parser.error(f"--share {args.share}: each must be in [0, 1)")
    backend, device, deadline = make_backend(args.backend), torch.device(args.device), Deadline(args.budget_s)
    joules = idle_watts = None
    if args.energy_s:
        try:
            joules = open_counter(device)
            idle_watts = measure_energy(partial(time.sleep, 0.1), joules, args.energy_s).watts
        except UnsupportedError as error:
            deadline.left_out.append(str(error))
    result = result_of(
        PrefillResult,
        args,
        device=device_name(device),
        cuda=torch.version.cuda if device.type == "cuda" else None,
        threads=torch.get_num_threads(),
        idle_watts=idle_watts,
        checks=[],
        timings=[],
        left_out=deadline.left_out,
        failures=[],
    )
    longest = max([_CHECK_TOKENS, *args.prompt, *(length + 200 for length in args.length)])
    num_slots = max(3 * _CHECK_TOKENS, 2 * longest) + _SPARE_SLOTS
    make_bench = partial(Bench, seed=args.seed, repeats=args.repeats, deadline=deadline)
    for name in args.model:
        # Held by the call alone: the memory of one model is free before the next one is drawn.
        _measure_model(make_bench(name, backend, num_slots, getattr(torch, args.dtype), device), args, joules, result)
    return Finding(result, show(result), 1 if result.failures else 0)


def make_backend(name: str) -> AttentionBackend:
    """The attention backend called `name`.

    Raises:
        UnsupportedError: its package is not installed.
    """
    if name == "torch":
        return TORCH
    if find_spec(name) is None:
        raise UnsupportedError(f"attention backend {name}: the package is not installed here.")
    from pic_bench.gpu.attention_triton import TRITON

    return TRITON


def _measure_model(bench: Bench, args: argparse.Namespace, joules: JouleCounter | None, result: PrefillResult) -> None:
    """Check and time one model; short prompts first, so that long ones are missing if the time ends."""
    name = bench.name

    def attempt(what: str, step: Callable[[], Iterable[T]], kept: list[T]) -> bool:
        """Whether a step raised nothing; the result so far is written in any case."""
        try:
            # One by one: what was timed before one fails is kept.
            for each in step():
                kept.append(each)
            return True
        except BenchError as error:
            result.failures.append(str(error))
        except Exception as error:
            # Compilers and drivers raise anything; the other steps are still worth their time.
            traceback.print_exc()
            first_line = str(error).partition("\n")[0][:200]
            result.left_out.append(f"{what}: {type(error).__name__}: {first_line}")
        finally:
            keep(args, result)
        return False

    if not attempt(f"{name}, {bench.backend.name}", lambda: [check_model(bench, _CHECK_TOKENS)], result.checks):
        return
    for num_tokens in sorted(args.prompt) if "gaps" in args.item else ():
        gaps = partial(time_gaps, bench, num_tokens, args.share, args.runs)
        attempt(f"{name}, {num_tokens:,} tokens", gaps, result.timings)
    for length in sorted(args.length) if "runs" in args.item else ():
        one_run = partial(time_runs, bench, length, args.index_tokens, joules, args.energy_s)
        attempt(f"{name}, a run of {length:,}", one_run, result.timings)


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
