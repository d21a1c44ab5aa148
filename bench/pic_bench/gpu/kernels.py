"""Time of a splice, by model shape, length and slot order, beside a plain copy of as many bytes and SGLang's own way.

Correctness first: a case with a wrong row is not timed and fails the run. Ways are timed in turns, so that a noisy
machine is unfair to all of them alike; the pool is larger than the caches and every call moves other rows. Bytes are
those read plus those written. SGLang's way is `move_kv_cache`'s copy of every buffer, then torch's RoPE per layer. On a
CPU set OMP_WAIT_POLICY=PASSIVE where other programs run on the same cores, as the CPU platform does for servers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import numpy as np
import torch
from pic_kernels import Backend

from pic_bench.gpu.clocks import take_turns
from pic_bench.gpu.kernel_pool import PAGE_SIZE, SHAPES, SLOT_ORDERS, Pool, Window, make_window
from pic_bench.report.markdown import Table, markdown_table
from pic_bench.study_command import Finding, Result, Study, at_least, result_of

_TOKENS: Final = (16, 128, 512, 1_504, 8_192, 32_768)
_ALL_ORDERS_AT: Final = 1_504
_POOL_BYTES: Final = 1 << 30
_MAX_WINDOWS: Final = 8


class KernelTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shape, length and slot order. Times on a GPU are the device's own, by events."""

    model: str
    slots: str
    tokens: int
    layers: int
    """As many of the model's as fit a third of the free memory."""
    layers_of_model: int
    backend: str
    bytes_moved: int
    rel_l2: float
    """Largest error of a layer's keys against the float32 reference; copied bytes are equal, or nothing is timed."""
    splice: list[float]
    """Milliseconds of every call, in turns with those of the other ways."""
    copy: list[float]
    move_then_rope: list[float]

    @property
    def share_of_copy(self) -> float:
        """Bandwidth of the splice over that of the copy: the median of the ratios of neighbouring samples."""
        return median(c / s for c, s in zip(self.copy, self.splice, strict=True))


class KernelResult(Result, frozen=True, kw_only=True):
    """The result file."""

    schema_version: int = 4
    device: str
    threads: int
    timings: list[KernelTiming]


STUDY = Study("gpu.kernels", __doc__)
ORDERS = f"order of the slots (default: pages; all at {_ALL_ORDERS_AT} tokens)"
STUDY.add("--model", choices=SHAPES, action="append", help="shape (default: all)")
STUDY.add("--slots", choices=SLOT_ORDERS, action="append", help=ORDERS)
STUDY.add("--tokens", type=int, action="append", metavar="N", help=f"of a splice, a multiple of {PAGE_SIZE}")
STUDY.add("--repeats", type=at_least(1), default=15, metavar="N", help="timed calls of each case")
STUDY.add("--device", default="cpu", help="cpu, cuda, ...")
STUDY.add("--backend", choices=[backend.value for backend in Backend], help="implementation (default: automatic)")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> Finding:
    """Check and time every case."""
    if any(n < PAGE_SIZE or n % PAGE_SIZE for n in args.tokens or ()):
        STUDY.parser.error(f"--tokens {args.tokens}: must be multiples of {PAGE_SIZE}")
    if args.backend:
        os.environ["SGLANG_PIC_KERNELS"] = args.backend
    device = torch.device(args.device)
    # Asked once: torch keeps the memory of the pools that are gone.
    budget = _free_bytes(device) // 3
    timings = [_measure(*case, args.repeats, device, budget) for case in _cases(args)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    result = result_of(KernelResult, args, device=name, threads=torch.get_num_threads(), timings=timings)
    return Finding(result, markdown_table(_table(timings)))


def _cases(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    return [
        (model, order, n)
        for model in args.model or SHAPES
        for n in args.tokens or _TOKENS
        for order in args.slots or (SLOT_ORDERS if n == _ALL_ORDERS_AT else ("pages",))
    ]


def _measure(model: str, order: str, num_tokens: int, repeats: int, device: torch.device, budget: int) -> KernelTiming:
    print(f"{model}, {order}, {num_tokens} tokens", file=sys.stderr)
    torch.manual_seed(0)
    shape = SHAPES[model]
    # A window is a source and a target of twice the tokens, so that scattered slots have gaps.
    layer_bytes = 4 * num_tokens * shape.layer_bytes
    layers = max(1, min(shape.layers, budget // layer_bytes))
    # Several where one is small enough to stay in a cache.
    num_windows = max(1, min(_MAX_WINDOWS, _POOL_BYTES // (layers * layer_bytes)))
    pool = Pool(shape, layers, 4 * num_tokens * num_windows, device)
    windows = [make_window(pool, order, num_tokens, 4 * num_tokens * index) for index in range(num_windows)]
    pool.fill()
    rel_l2 = pool.check(windows[0])
    # Never the window that the call before has just moved.
    upcoming = cycle(windows)

    def on_next(way: Callable[[Window], None]) -> Callable[[], None]:
        return lambda: way(next(upcoming))

    ways = {"splice": pool.move, "copy": pool.copy, "move_then_rope": pool.move_then_rope}
    return KernelTiming(
        model=model,
        slots=order,
        tokens=num_tokens,
        layers=layers,
        layers_of_model=shape.layers,
        backend=pool.choice().backend.value,
        bytes_moved=2 * num_tokens * pool.token_bytes,
        rel_l2=rel_l2,
        **take_turns({name: on_next(way) for name, way in ways.items()}, repeats, device),
    )


def _table(timings: list[KernelTiming]) -> Table:
    header = ["shape", "slots", "tokens", "layers", "splice ms", "p90", "GB/s", "copy GB/s", "of copy"]
    rows = [
        [
            *(t.model, t.slots, f"{t.tokens:,}", f"{t.layers}/{t.layers_of_model}", f"{median(t.splice):.3f}"),
            f"{np.percentile(t.splice, 90):.3f}",
            *(f"{t.bytes_moved / median(way) / 1e6:.1f}" for way in (t.splice, t.copy)),
            *(f"{t.share_of_copy:.0%}", f"{median(t.move_then_rope) / median(t.splice):.1f} x"),
            *(f"{t.rel_l2:.0e}", t.backend),
        ]
        for t in timings
    ]
    return Table([*header, "move, rope", "rel L2", "backend"], rows)


def _free_bytes(device: torch.device) -> int:
    """Of the device; of a CPU's memory one half counts as free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


if __name__ == "__main__":
    sys.exit(main())
