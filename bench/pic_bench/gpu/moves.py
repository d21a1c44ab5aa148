"""The items about moved rows: is the device there, are rows that a splice moved right, and how fast do they move?

Right for every dtype and layout, also in a layer of more than 2^31 elements, where 32-bit addresses would wrap, and in
one small case under compute-sanitizer where that is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import msgspec
import torch
from pic_kernels import Backend
from pic_kernels.numerics import ROTATE_REL_L2
from pic_kernels.operands import SUPPORTED_DTYPES

from pic_bench.gpu import kernels
from pic_bench.gpu.kernel_pool import LAYOUTS, Pool, Shape, Window
from pic_bench.gpu.record import Found, Work
from sglang_pic.errors import BenchError

_SHIFTS: Final = (1_021, 0, -37, 131_072, 1)
_FP8: Final = torch.float8_e4m3fn
_SANITIZER_S: Final = 150


def run_moves(work: Work) -> Found:
    """Every dtype and layout, then the large layer, then the sanitizer."""
    if work.is_dry:
        os.environ["SGLANG_PIC_KERNELS"] = "triton"
    device, num_tokens = torch.device(work.device), 7 if work.is_dry else 1_504
    errors: dict[str, float] = {}
    found = Found(raw={"errors": errors, "tokens": num_tokens})
    for name, layout, dtype, num_slots in _cases(num_tokens):
        if dtype == _FP8 and not work.is_dry and torch.cuda.get_device_capability(device) < (8, 9):
            found.notes.append(f"{name}: FP8 needs compute capability 8.9")
            continue
        try:
            errors[name] = check_moves(layout, dtype, num_slots, num_tokens, device)
        except BenchError as error:
            found.failures.append(f"{name}: {error}")
    if errors:
        found.figures["move_error"] = max(errors.values())
    _sanitize(work, found)
    return found


def _cases(num_tokens: int) -> Iterator[tuple[str, Shape, torch.dtype, int]]:
    for dtype in SUPPORTED_DTYPES:
        for name, layout in LAYOUTS.items():
            yield f"{name}, {dtype}", layout, dtype, 3 * num_tokens
    # A pool of 2^32 elements, half of its rows beyond 2^31; FP8 keeps it at 4.3 GB.
    latent = LAYOUTS["MLA"]
    yield "MLA beyond 2^31 elements", latent, _FP8, (1 << 32) // latent.dim + 3 * num_tokens


def check_moves(layout: Shape, dtype: torch.dtype, num_slots: int, num_tokens: int, device: torch.device) -> float:
    """Move rows between slots spread over the whole pool; the largest error as a share of what `dtype` allows.

    Raises:
        BenchError: a key is further off, a copied or an untouched byte differs, or another kernel than the fused one
            would serve these rows.
    """
    random = torch.Generator().manual_seed(5)
    # Three groups of slots that differ, all over the pool.
    places = torch.randperm(3 * num_tokens, generator=random)
    slots = (places * (num_slots // (3 * num_tokens)) + num_slots % (3 * num_tokens)).to(device)
    src, dst, other = slots.split(num_tokens)
    shifts = torch.tensor(_SHIFTS).repeat_interleave(-(-num_tokens // len(_SHIFTS)))[:num_tokens].to(device)
    pool = Pool(layout, 1, num_slots, device, dtype)
    for raw in pool.bits:
        rows = torch.randn(3 * num_tokens, layout.heads, layout.dim, generator=random).to(dtype).to(device)
        raw[slots] = rows.view(raw.dtype)
    before = [raw[other] for raw in pool.bits]
    choice = pool.choice()
    error = pool.check(Window(src, dst, shifts, 0, 0))
    if choice.backend is not Backend.TRITON:
        raise BenchError(f"served by {choice.backend.value}, not by the fused kernel: {choice.reason}")
    if not all(torch.equal(raw[other], untouched) for raw, untouched in zip(pool.bits, before, strict=True)):
        raise BenchError("rows that are not part of the splice have changed")
    return error / ROTATE_REL_L2[dtype]


def check_small(device: str) -> None:
    """One small case of either op, for the sanitizer."""
    for layout in (LAYOUTS["NeoX"], LAYOUTS["MLA"]):
        check_moves(layout, torch.bfloat16, 120, 40 if device == "cuda" else 5, torch.device(device))


def _sanitize(work: Work, found: Found) -> None:
    """Run one small case under the sanitizer, or by itself in a dry run, and tell what it found or why it could not."""
    command = [sys.executable, "-c", f"from pic_bench.gpu import moves; moves.check_small({work.device!r})"]
    if not work.is_dry:
        command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99", *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SANITIZER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        found.notes.append(f"memory accesses were not checked: {error}")
        return
    tail = (done.stdout + done.stderr).strip()[-1_000:]
    if (work.is_dry and done.returncode) or (done.returncode == 99 and "Device not supported" not in tail):
        found.failures.append(f"memory checks failed: {tail}")
    elif done.returncode:
        found.notes.append(f"compute-sanitizer could not check here (exit status {done.returncode}): {tail}")


def run_versions(work: Work) -> Found:
    """Multiply two matrices on the device; the record has the versions, as every record has."""
    side = 64 if work.is_dry else 4096
    generator = torch.Generator(work.device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=work.device) for _ in range(2))
    wide = (left[:8].double() @ right.double()).float()
    failures = [] if torch.allclose((left @ right)[:8], wide, rtol=1e-2, atol=0.5) else ["a product is wrong"]
    card = None if work.is_dry else str(torch.cuda.get_device_properties(0))
    return Found(failures=failures, raw={"card": card, "cuda": torch.version.cuda})


def run_bandwidth(work: Work) -> Found:
    """`kernels` on the device: the bytes of every model's rows, spliced and copied."""
    options = ["--device", work.device]
    if work.is_dry:
        os.environ["SGLANG_PIC_KERNELS"] = "auto"
        options += ["--model", "SmolLM2-135M", "--tokens", "512", "--repeats", "3"]
    result, shown, _ = kernels.STUDY.find(*options)
    assert isinstance(result, kernels.KernelResult)
    print(shown)
    figures = {
        name: min(each.share_of_copy for each in result.timings if each.tokens >= least)
        for name, least in (("share_of_copy_512", 512), ("share_of_copy", 512 if work.is_dry else 8_192))
    }
    served = {each.backend for each in result.timings}
    failures = [f"served by {name}, not by the fused kernel" for name in served - {"triton"} if not work.is_dry]
    return Found(figures=figures, failures=failures, raw=msgspec.to_builtins(result))
