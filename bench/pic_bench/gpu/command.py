"""The command line of `gpu_prefill`: a model is checked, then its gaps and runs are timed as far as the time goes."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from pic_bench.environment import capture_environment
from pic_bench.gpu.attention import TORCH, AttentionBackend
from pic_bench.gpu.check import Check, check_model
from pic_bench.gpu.energy import JouleCounter, measure_energy, open_counter
from pic_bench.gpu.measure import Bench, PrefillTiming, time_gaps, time_runs
from pic_bench.gpu.model import MODELS, TINY, Pool, Skeleton
from pic_bench.gpu.result import PrefillResult, show
from pic_bench.gpu.timing import Deadline
from pic_bench.out_folder import write_json
from sglang_pic.errors import BenchError, UnsupportedError

_ITEMS: Final = ("gaps", "runs")
_BACKENDS: Final = ("triton", "torch")
_CHECK_TOKENS: Final = 1_024
_SPARE_SLOTS: Final = 256


def run(argv: Sequence[str] | None = None) -> int:
    """Measure until the time is over: tables, and with `--out` a result file; 1 where a check failed."""
    args = _parse(argv)
    try:
        backend = make_backend(args.backend)
    except UnsupportedError as error:
        print(f"gpu_prefill: {error}", file=sys.stderr)
        return 1
    work = _Work(args)
    for name in args.model:
        work.measure_model(name, backend)
    result = work.result()
    print(show(result))
    return 1 if result.failures else 0


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
        if self._args.out:
            write_json(self._args.out, self.result())
        return not raised


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pic_bench.gpu_prefill", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    is_gpu = torch.cuda.is_available()
    real = [name for name in MODELS if name not in TINY]
    lengths = [100, 200, 300, 500, 1_000, 1_500, 3_000, 6_000]
    add = parser.add_argument
    add("--item", nargs="+", choices=_ITEMS, default=list(_ITEMS), help="what to time")
    add("--model", nargs="+", choices=[*MODELS], default=real, help="dimensions, with random weights")
    add("--backend", choices=_BACKENDS, default="triton" if is_gpu else "torch", help="who attends")
    add("--device", default="cuda" if is_gpu else "cpu", help="where to run")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of weights and rows")
    add("--prompt", nargs="+", type=int, default=[2_048, 8_192, 32_768], help="tokens, for gaps")
    add("--share", nargs="+", type=float, default=[0.0, 0.5, 0.9, 0.99], help="of a prompt that is spliced, for gaps")
    add("--runs", nargs="+", type=int, default=[1, 8, 32], help="of a prompt, for gaps")
    add("--length", nargs="+", type=int, default=lengths, help="tokens of the one run, for runs")
    add("--index-tokens", type=int, default=1_600_000, help="other text in the chunk index, for runs")
    add("--repeats", type=int, default=15, help="timed calls of each way; one that takes long gets three")
    add("--energy-s", type=float, default=3.0, help="seconds of repeats per joule figure; 0: no energy")
    add("--budget-s", type=float, default=540.0, help="seconds for all; cases that do not fit are left out and named")
    add("--seed", type=int, default=1, help="of weights, prompts and slots")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON, with every sample")
    args = parser.parse_args(argv)
    if not all(0 <= share < 1 for share in args.share):
        parser.error(f"--share {args.share}: each must be in [0, 1)")
    if min(args.prompt + args.runs + args.length + [args.repeats]) < 1 or args.energy_s < 0 or args.index_tokens < 0:
        parser.error("--prompt, --runs, --length and --repeats: 1 or more; --energy-s and --index-tokens: 0 or more")
    return args
