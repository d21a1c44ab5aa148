"""Time of a splice against a plain copy of the same bytes, by model shape and by how the slots lie.

Owns `python -m pic_bench.kernels`. Correctness first: a shape whose result differs from the reference by more than
the kernels' tolerance is not timed. The pool is several times larger than what one call touches and every repeat
moves other rows, so that nothing is served from a warm cache. Knows the kernels, not SGLang.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import msgspec
import torch
from pic_kernels import RopeParams, reference, splice_mha, splice_mla
from pic_kernels.numerics import ROTATE_REL_L2, relative_l2
from torch import Tensor

from sglang_pic.errors import BenchError

__all__ = ["KernelTiming", "main"]


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """KV geometry of a model; `latent` is 0 where keys and values have buffers of their own."""

    layers: int
    heads: int
    dim: int
    rotary_dim: int
    latent: int = 0


_SHAPES: Final = {
    "SmolLM2-135M": _Shape(layers=30, heads=3, dim=64, rotary_dim=64),
    "Llama-3.1-8B": _Shape(layers=32, heads=8, dim=128, rotary_dim=128),
    "DeepSeek-V2-Lite": _Shape(layers=27, heads=1, dim=576, rotary_dim=64, latent=512),
}
_SLOT_ORDERS: Final = ("run", "pages", "scattered")
_NUM_WINDOWS: Final = 3
_SHIFT: Final = 1_021
_PAGE: Final = 16


class KernelTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shape, one order of slots; times are medians in milliseconds, spread is the 10th and 90th percentile."""

    schema_version: int = 1
    model: str
    slots: str
    tokens: int
    dtype: str
    device: str
    threads: int
    bytes_moved: int
    """Read plus written."""
    rel_l2: float
    """Largest error of a key against the float32 reference, over layers."""
    splice_ms: float
    splice_spread_ms: tuple[float, float]
    copy_ms: float
    splice_gb_s: float
    copy_gb_s: float
    share_of_copy: float
    """Bandwidth of the splice over that of the copy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the table, or JSON lines with `--json`, goes to stdout."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(_SHAPES), action="append", help="shape to time; default all")
    parser.add_argument("--slots", choices=_SLOT_ORDERS, action="append", help="order of the slots; default all")
    parser.add_argument("--tokens", type=int, default=1_504, help="tokens per splice, a multiple of 16")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls per case, after three to warm up")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    args = parser.parse_args(argv)
    if args.tokens < _PAGE or args.tokens % _PAGE or args.repeats < 1:
        parser.error(f"--tokens {args.tokens}: must be a multiple of {_PAGE}; --repeats {args.repeats}: at least 1")
    if not args.json:
        columns = ("splice ms", "copy ms", "GB/s", "copy GB/s", "share", "rel L2")
        print(f"{'model':18}{'slots':11}" + "".join(f"{column:>11}" for column in columns))
    for model in args.model or _SHAPES:
        for slots in args.slots or _SLOT_ORDERS:
            try:
                timing = _measure(model, slots, args.tokens, args.repeats, torch.device(args.device))
            except BenchError as error:
                print(error, file=sys.stderr)
                return 1
            if args.json:
                print(msgspec.json.encode(timing).decode(), flush=True)
            else:
                print(
                    f"{model:18}{slots:11}{timing.splice_ms:11.2f}{timing.copy_ms:11.2f}{timing.splice_gb_s:11.1f}"
                    f"{timing.copy_gb_s:11.1f}{timing.share_of_copy:11.0%}{timing.rel_l2:11.1e}",
                    flush=True,
                )
    return 0


class _Pool:
    """The buffers of one shape and the ops on them."""

    def __init__(self, shape: _Shape, num_slots: int, device: torch.device) -> None:
        num_buffers = shape.layers * (1 if shape.latent else 2)
        self.layers, self.latent = shape.layers, shape.latent
        self.buffers = [
            torch.randn((num_slots, shape.heads, shape.dim), dtype=torch.bfloat16, device=device)
            for _ in range(num_buffers)
        ]
        inv_freq = 1e4 ** -(torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32, device=device) / shape.rotary_dim)
        self.rope = RopeParams(inv_freq, shape.rotary_dim, is_neox_style=not shape.latent)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all buffers."""
        return sum(buffer[0].nbytes for buffer in self.buffers)

    def splice(self, src: Tensor, dst: Tensor, shifts: Tensor) -> None:
        """The op under test."""
        if self.latent:
            splice_mla(self.buffers, src, dst, shifts, self.rope, rope_offset=self.latent)
        else:
            splice_mha(self.buffers[: self.layers], self.buffers[self.layers :], src, dst, shifts, self.rope)

    def expected(self, src: Tensor, shifts: Tensor) -> list[Tensor]:
        """What the reference makes of the rows `src`, per buffer."""
        n = src.numel()
        small = [torch.cat((buffer[src], buffer[src])) for buffer in self.buffers]
        slots = torch.arange(2 * n, device=src.device)
        if self.latent:
            reference.splice_mla(small, slots[:n], slots[n:], shifts, self.rope, rope_offset=self.latent)
        else:
            keys, values = small[: self.layers], small[self.layers :]
            reference.splice_mha(keys, values, slots[:n], slots[n:], shifts, self.rope)
        return [buffer[n:] for buffer in small]

    def copy(self, src: int, dst: int, num_tokens: int) -> None:
        """The baseline: as many bytes, as one slice per buffer."""
        for buffer in self.buffers:
            buffer[dst : dst + num_tokens].copy_(buffer[src : src + num_tokens])


def _measure(model: str, slots: str, num_tokens: int, repeats: int, device: torch.device) -> KernelTiming:
    """Check, then time, one case."""
    torch.manual_seed(0)
    # A window is a source and a target of twice the tokens, so that scattered slots have gaps.
    pool = _Pool(_SHAPES[model], 4 * num_tokens * _NUM_WINDOWS, device)
    windows = [_window(slots, num_tokens, 4 * num_tokens * index, device) for index in range(_NUM_WINDOWS)]
    shifts = torch.full((num_tokens,), _SHIFT, device=device)
    src, dst = windows[0]
    expected = pool.expected(src, shifts)
    pool.splice(src, dst, shifts)
    rel_l2 = max(relative_l2(buffer[dst], want) for buffer, want in zip(pool.buffers, expected, strict=True))
    if not rel_l2 <= ROTATE_REL_L2[torch.bfloat16]:
        raise BenchError(f"{model}, {slots}: wrong rows, relative L2 {rel_l2:.2g}; nothing was timed.")
    splice_s = _time(lambda index: pool.splice(*windows[index], shifts), repeats, device)
    start = [4 * num_tokens * index for index in range(_NUM_WINDOWS)]
    copy_s = _time(lambda index: pool.copy(start[index], start[index] + 2 * num_tokens, num_tokens), repeats, device)
    bytes_moved = 2 * num_tokens * pool.token_bytes
    splice, copy = median(splice_s), median(copy_s)
    return KernelTiming(
        model=model,
        slots=slots,
        tokens=num_tokens,
        dtype="bfloat16",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        threads=torch.get_num_threads(),
        bytes_moved=bytes_moved,
        rel_l2=rel_l2,
        splice_ms=splice * 1e3,
        splice_spread_ms=(splice_s[len(splice_s) // 10] * 1e3, splice_s[len(splice_s) * 9 // 10] * 1e3),
        copy_ms=copy * 1e3,
        splice_gb_s=bytes_moved / splice / 1e9,
        copy_gb_s=bytes_moved / copy / 1e9,
        share_of_copy=copy / splice,
    )


def _window(slots: str, num_tokens: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Source and target slots inside `[start, start + 4 * num_tokens)`."""
    pair = []
    for at in (start, start + 2 * num_tokens):
        if slots == "run":
            index = torch.arange(num_tokens)
        elif slots == "pages":
            order = torch.randperm(2 * num_tokens // _PAGE)[: num_tokens // _PAGE]
            index = (order[:, None] * _PAGE + torch.arange(_PAGE)).flatten()
        else:
            index = torch.randperm(2 * num_tokens)[:num_tokens]
        pair.append((index + at).to(device))
    return pair[0], pair[1]


def _time(call: Callable[[int], None], repeats: int, device: torch.device) -> list[float]:
    """Sorted wall times of `repeats` calls in seconds, the device idle before and after each."""
    times: list[float] = []
    for index in range(3 + repeats):
        _synchronize(device)
        begin = time.perf_counter()
        call(index % _NUM_WINDOWS)
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[3:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
