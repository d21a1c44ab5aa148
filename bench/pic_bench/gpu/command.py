"""The work of `gpu_prefill`: a model is checked, then its gaps and runs are timed as far as the time goes."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
import torch

from pic_bench.environment import Environment, capture_environment
from pic_bench.frame import Finding, Study, at_least, keep
from pic_bench.gpu.clocks import Deadline, JouleCounter, measure_energy, open_counter
from pic_bench.gpu.measure import Bench, Check, PrefillTiming, check_model, time_gaps, time_runs
from pic_bench.gpu.model import MODELS, TINY, TORCH, AttentionBackend, Pool, Skeleton
from pic_bench.report.markdown import Table, markdown_table
from sglang_pic.errors import BenchError, UnsupportedError

_ITEMS: Final = ("gaps", "runs")
_BACKENDS: Final = ("triton", "torch")
_CHECK_TOKENS: Final = 1_024
_SPARE_SLOTS: Final = 256


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
    backend = make_backend(args.backend)
    work = _Work(args)
    for name in args.model:
        work.measure_model(name, backend)
    result = work.result()
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


class _Work:
    """Everything measured so far; the result file is written again after every step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._device, self._dtype = torch.device(args.device), getattr(torch, args.dtype)
        self._deadline = Deadline(args.budget_s)
        self._environment = capture_environment()
        self._checks: list[Check] = []
        self._timings: list[PrefillTiming] = []
        self._failures: list[str] = []
        self._joules: JouleCounter | None = None
        if args.energy_s:
            try:
                self._joules = open_counter(self._device)
            except UnsupportedError as error:
                self._deadline.left_out.append(str(error))
        idle = partial(time.sleep, 0.1)
        self._idle_watts = measure_energy(idle, self._joules, args.energy_s).watts if self._joules else None

    def measure_model(self, name: str, backend: AttentionBackend) -> None:
        """Build, check and time one model; short prompts first, so that long ones are missing if the time ends."""
        args = self._args
        longest = max([_CHECK_TOKENS, *args.prompt, *(length + 200 for length in args.length)])
        num_slots = max(3 * _CHECK_TOKENS, 2 * longest) + _SPARE_SLOTS
        model = Skeleton(MODELS[name], self._dtype, self._device, args.seed)
        pool = Pool(MODELS[name], num_slots, self._dtype, self._device)
        slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(args.seed)).to(self._device)
        bench = Bench(name, model, pool, slots, backend, args.repeats, args.seed, self._deadline)

        def check() -> None:
            self._checks.append(check_model(name, model, pool, backend, _CHECK_TOKENS))

        def gaps(num_tokens: int) -> None:
            # Case by case into the list: what was timed before one fails is kept.
            for timing in time_gaps(bench, num_tokens, args.share, args.runs):
                self._timings.append(timing)

        def run(length: int) -> None:
            if timing := time_runs(bench, length, args.index_tokens, self._joules, args.energy_s):
                self._timings.append(timing)

        if not self._try(f"{name}, {backend.name}", check):
            return
        for num_tokens in sorted(args.prompt) if "gaps" in args.item else ():
            self._try(f"{name}, {num_tokens:,} tokens", partial(gaps, num_tokens))
        for length in sorted(args.length) if "runs" in args.item else ():
            self._try(f"{name}, a run of {length:,}", partial(run, length))

    def result(self) -> PrefillResult:
        """Everything so far."""
        is_gpu = self._device.type == "cuda"
        return PrefillResult(
            environment=self._environment,
            device=torch.cuda.get_device_name(self._device) if is_gpu else self._device.type,
            cuda=torch.version.cuda if is_gpu else None,
            threads=torch.get_num_threads(),
            dtype=self._args.dtype,
            idle_watts=self._idle_watts,
            checks=self._checks,
            timings=self._timings,
            left_out=self._deadline.left_out,
            failures=self._failures,
        )

    def _try(self, what: str, step: Callable[[], None]) -> bool:
        """Whether a step raised nothing; the result so far is written in any case."""
        raised = True
        try:
            step()
            raised = False
        except BenchError as error:
            self._failures.append(str(error))
        except Exception as error:
            # Compilers and drivers raise anything; the other steps are still worth their time.
            traceback.print_exc()
            first_line = str(error).partition("\n")[0][:200]
            self._deadline.left_out.append(f"{what}: {type(error).__name__}: {first_line}")
        keep(self._args, self.result())
        return not raised


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
