"""Owns the command line of `bench-prefill`, the order of its work and the result file.

    check   every backend and way, before anything is timed with it; a backend that fails is left out and fails the run
    gaps    prompts by share of hits and number of runs: full, prefix hit of as many computed tokens, gaps
    runs    time to first token and energy by length of one run, a miss beside a hit

It must not know how any of it is measured.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from pic_bench.compare.summary import write_json
from pic_bench.environment import capture_environment
from pic_bench.gpu_attention import BACKENDS, AttentionBackend, make_backend
from pic_bench.gpu_check import Check, check_model
from pic_bench.gpu_dims import MODELS, TINY
from pic_bench.gpu_energy import EnergyCounter, measure_idle, open_counter
from pic_bench.gpu_measure import Bench, GapTiming, RunTiming, time_gaps, time_runs
from pic_bench.gpu_model import LatentPath, Pool, Skeleton
from pic_bench.gpu_tables import PrefillResult, show
from pic_bench.gpu_timing import Deadline
from sglang_pic.errors import BenchError, UnsupportedError

__all__ = ["run"]

_ITEMS: Final = ("gaps", "runs")
_CHECK_TOKENS: Final = 1_024
_SPARE_SLOTS: Final = 256
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_IDLE_S: Final = 3.0


def run(argv: Sequence[str] | None = None) -> int:
    """Measure what was asked for, as far as the time goes: tables, and with `--out` a result file."""
    args = _parse(argv)
    device, dtype = torch.device(args.device), _DTYPES[args.dtype]
    deadline = Deadline(args.budget_s)
    counter, no_counter = (None, "") if args.energy_s == 0 else open_counter(device)
    if no_counter:
        deadline.left_out.append(no_counter)
    work = _Work(args, device, dtype, deadline, counter)
    for name in args.model:
        work.measure_model(name)
    result = work.result()
    print(show(result))
    return 1 if work.failures else 0


class _Work:
    """What has been measured so far; the result file is written anew after every step."""

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        dtype: torch.dtype,
        deadline: Deadline,
        counter: EnergyCounter | None,
    ) -> None:
        self._args, self._device, self._dtype = args, device, dtype
        self._deadline, self._counter = deadline, counter
        self._environment = capture_environment()
        self._checks: list[Check] = []
        self._gaps: list[GapTiming] = []
        self._runs: list[RunTiming] = []
        self._experts: dict[str, str] = {}
        self.failures: list[str] = []
        self._idle_watts = measure_idle(counter, _IDLE_S) if counter else None

    def measure_model(self, name: str) -> None:
        """Build, check and time one model on every backend."""
        args = self._args
        longest = max([_CHECK_TOKENS, *args.prompt, *(length + 200 for length in args.length)])
        num_slots = max(3 * _CHECK_TOKENS, 2 * longest) + _SPARE_SLOTS
        model = Skeleton(MODELS[name], self._dtype, self._device, args.seed)
        pool = Pool(MODELS[name], num_slots, self._dtype, self._device)
        slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(args.seed)).to(self._device)
        if model.experts_way:
            self._experts[name] = model.experts_way
        benches = []
        for backend in self._backends():
            paths = self._checked(name, model, pool, backend)
            if paths:
                bench = Bench(
                    name=name,
                    model=model,
                    pool=pool,
                    slots=slots,
                    backend=backend,
                    repeats=args.repeats,
                    seed=args.seed,
                    deadline=self._deadline,
                )
                benches.append((bench, paths))
            self._save()
        # Short prompts on every backend come first: if the time ends, the long ones are missing.
        for num_tokens in sorted(args.prompt) if "gaps" in args.item else ():
            for bench, paths in benches:
                self._try(
                    f"{name}, {bench.backend.name}, {num_tokens:,} tokens",
                    partial(self._time_prompt, bench, num_tokens, paths),
                )
        for length in sorted(args.length) if "runs" in args.item else ():
            for bench, paths in benches:
                self._try(
                    f"{name}, {bench.backend.name}, a run of {length:,}",
                    partial(self._time_run, bench, length, paths[0]),
                )

    def result(self) -> PrefillResult:
        """Everything so far."""
        is_gpu = self._device.type == "cuda"
        return PrefillResult(
            environment=self._environment,
            device=torch.cuda.get_device_name(self._device) if is_gpu else self._device.type,
            cuda=torch.version.cuda if is_gpu else None,
            threads=torch.get_num_threads(),
            dtype=self._args.dtype,
            experts=self._experts,
            idle_watts=self._idle_watts,
            checks=self._checks,
            gaps=self._gaps,
            runs=self._runs,
            left_out=self._deadline.left_out,
            failures=self.failures,
        )

    def _time_prompt(self, bench: Bench, num_tokens: int, paths: list[LatentPath]) -> None:
        # Case by case into the list: what was timed before one fails is kept.
        for timing in time_gaps(bench, num_tokens, self._args.share, self._args.runs, paths):
            self._gaps.append(timing)

    def _time_run(self, bench: Bench, length: int, path: LatentPath) -> None:
        args = self._args
        timing = time_runs(bench, length, path, args.index_tokens, self._counter, args.energy_s)
        if timing is not None:
            self._runs.append(timing)

    def _backends(self) -> list[AttentionBackend]:
        backends = []
        for name in self._args.backend:
            try:
                backends.append(make_backend(name, self._device))
            except (UnsupportedError, ImportError, OSError, RuntimeError) as error:
                self._leave_out(f"{name}: {_first_line(error)}")
        return backends

    def _checked(self, name: str, model: Skeleton, pool: Pool, backend: AttentionBackend) -> list[LatentPath]:
        """The ways that this backend serves rightly."""
        paths = []
        for path in [LatentPath(path) for path in self._args.path] if model.dims.latent else [LatentPath.EXPANDED]:
            what = f"{name}, {backend.name} {path.value}"
            if backend.name == "torch" and path is LatentPath.ABSORBED and self._device.type == "cuda":
                self._leave_out(f"{what}: torch has no flash kernel for heads of {model.dims.row_dim}")
                continue
            try:
                self._checks += check_model(name, model, pool, backend, path, _CHECK_TOKENS)
                paths.append(path)
            except BenchError as error:
                self.failures.append(str(error))
            except Exception as error:
                # Compilers and drivers raise what they like; the other backends are still worth their time.
                traceback.print_exc()
                self._leave_out(f"{what}: {type(error).__name__}: {_first_line(error)}")
        return paths

    def _try(self, what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except BenchError as error:
            self.failures.append(str(error))
        except Exception as error:
            traceback.print_exc()
            self._leave_out(f"{what}: {type(error).__name__}: {_first_line(error)}")
        self._save()

    def _leave_out(self, note: str) -> None:
        if note not in self._deadline.left_out:
            self._deadline.left_out.append(note)
            print(f"left out: {note}", file=sys.stderr)

    def _save(self) -> None:
        if self._args.out:
            write_json(self._args.out, self.result())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pic_bench.gpu_prefill", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    real = [name for name in MODELS if name not in TINY]
    parser.add_argument("--item", nargs="+", choices=_ITEMS, default=list(_ITEMS), help="what to time")
    parser.add_argument("--model", nargs="+", choices=[*MODELS], default=real, help="dimensions, with random weights")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="attention backends")
    parser.add_argument(
        "--path",
        nargs="+",
        choices=[path.value for path in LatentPath],
        default=[path.value for path in LatentPath],
        help="how a latent is attended behind a prefix; run lengths take the first that the backend has",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=[*_DTYPES], default="bfloat16")
    parser.add_argument("--prompt", nargs="+", type=int, default=[2_048, 8_192, 32_768], help="tokens, for gaps")
    parser.add_argument(
        "--share", nargs="+", type=float, default=[0.0, 0.5, 0.9, 0.99], help="of a prompt that is spliced"
    )
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 8, 32], help="of a prompt")
    lengths = [100, 200, 300, 500, 1_000, 1_500, 3_000, 6_000]
    parser.add_argument("--length", nargs="+", type=int, default=lengths, help="tokens of the one run, for runs")
    parser.add_argument("--index-tokens", type=int, default=1_600_000, help="other text in the chunk index, for runs")
    parser.add_argument(
        "--repeats", type=int, default=15, help="timed calls of each way, for 2 s or three at the least"
    )
    parser.add_argument("--energy-s", type=float, default=3.0, help="seconds of repeats per joule figure; 0: none")
    parser.add_argument("--budget-s", type=float, default=540.0, help="what does not fit is left out, and said so")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result as JSON, with every sample")
    args = parser.parse_args(argv)
    if not all(0 <= share < 1 for share in args.share):
        parser.error(f"--share {args.share}: each must be in [0, 1)")
    if min(args.prompt + args.runs + args.length + [args.repeats]) < 1 or args.energy_s < 0 or args.index_tokens < 0:
        parser.error("--prompt, --runs, --length and --repeats: 1 or more; --energy-s and --index-tokens: 0 or more")
    return args


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
