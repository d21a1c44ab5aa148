"""The items that time prefills and splices with no server: gaps, runs, bandwidth, energy.

Decoders of published dimensions with random weights, the server's own planner, layout of gaps and splicer. On a CPU
the dimensions are tiny, and joules are seconds of the processor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np
import torch

from pic_bench.gpu import bandwidth, command
from pic_bench.gpu.clocks import JouleCounter, measure_energy, open_counter
from pic_bench.gpu.command import PrefillResult, break_even
from pic_bench.gpu.measure import Bench, share_of_allowed
from pic_bench.gpu.model import MODELS
from pic_bench.gpu.passes import make_lookup
from pic_bench.gpu.record import Found, Work
from sglang_pic.core import MOST_REUSE
from sglang_pic.errors import BenchError, UnsupportedError

_SPARE_S: Final = 60.0
_LENGTHS: Final = (16, 32, 48, 63, 100, 200, 500, 1_000, 1_500, 3_000, 6_000)
_MLA, _GQA = "DeepSeek-V2-Lite", "Llama-3.1-8B"
_REUSED: Final = 0.95
_SEAM: Final = 32
_DRY_MODELS: Final = {_MLA: "tiny-mla-dims", _GQA: "tiny-gqa-dims"}


def run_gaps(work: Work) -> Found:
    """Both models: checks, then prefills by share of hits. What is wrong is not timed."""
    # Tens of seconds go into each model's weights and checks.
    budget = (work.limit_s - _SPARE_S) / 2
    options = ["--prompt", "512", "--repeats", "3"] if work.is_dry else ["--runs", "8", "--repeats", "7"]
    results = [_measure(work, name, ["--item", "gaps", *options], budget) for name in (_GQA, _MLA)]
    figures = {}
    if shares := [share_of_allowed(check) for result in results for check in result.checks]:
        figures["gap_error"] = max(shares)
    longest = 512 if work.is_dry else 32_768
    for name, result in zip(("gaps_8b", "gaps_mla"), results, strict=True):
        for timing in result.timings:
            if timing.prompt_tokens == longest and 0.85 < timing.share < 0.95:
                figures[name] = timing.speedup
    return _found(figures, results)


def run_runs(work: Work) -> Found:
    """First tokens of requests with one run, by its length."""
    lengths = ["32", "100", "300"] if work.is_dry else [str(length) for length in _LENGTHS]
    options = ["--item", "runs", "--length", *lengths, "--energy-s", "0"]
    if work.is_dry:
        options += ["--index-tokens", "2000", "--repeats", "3"]
    result = _measure(work, _MLA, options, work.limit_s - _SPARE_S)
    figures = {f"run_{t.repeated_tokens}": t.speedup for t in result.timings if t.repeated_tokens in (3_000, 6_000)}
    notes = []
    if len(result.timings) == len(lengths):
        if (least := break_even(result.timings)) is None:
            notes.append("no length of a run pays")
        else:
            figures["break_even"] = least
    return _found(figures, [result], notes)


def run_bandwidth(work: Work) -> Found:
    """`bandwidth` on the device: the bytes of every model's rows, spliced and copied."""
    options = ["--device", work.device]
    if work.is_dry:
        os.environ["SGLANG_PIC_KERNELS"] = "auto"
        options += ["--model", "SmolLM2-135M", "--tokens", "512", "--memory-gib", "0.1", "--repeats", "3"]
    result, shown, _ = bandwidth.STUDY.find(*options)
    assert isinstance(result, bandwidth.KernelResult)
    print(shown)
    figures = {
        name: min(each.share_of_copy for each in result.timings if each.tokens >= least)
        for name, least in (("share_of_copy_512", 512), ("share_of_copy", 512 if work.is_dry else 8_192))
    }
    served = {each.backend for each in result.timings}
    failures = [f"served by {name}, not by the fused kernel" for name in served - {"triton"} if not work.is_dry]
    return Found(figures=figures, notes=result.left_out, failures=failures, raw=msgspec.to_builtins(result))


def run_energy(work: Work) -> Found:
    """Joules of a prompt computed in full and with 95 % of it spliced, everything that the reuse costs included."""
    device = torch.device(work.device)
    joules: JouleCounter = time.process_time
    if not work.is_dry:
        try:
            joules = open_counter(device)
        except UnsupportedError as error:
            return Found(notes=[str(error)])
    seconds, repeats = (0.1, 1) if work.is_dry else (6.0, 3)
    idle = measure_energy(lambda: time.sleep(0.1), joules, seconds).watts
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {"idle_watts": idle, "dry joules are seconds of the processor": work.is_dry}
    for figure, name in (("energy_mla", _MLA), ("energy_8b", _GQA)):
        full, spliced = _energy_ways(_DRY_MODELS[name] if work.is_dry else name, device, is_dry=work.is_dry)
        # In turns, so that a card that warms up is unfair to both alike.
        pairs = [[measure_energy(way, joules, seconds) for way in (full, spliced)] for _ in range(repeats)]
        figures[figure] = 1 - median(reused.joules_each / whole.joules_each for whole, reused in pairs)
        raw[name] = msgspec.to_builtins([{"full": whole, "spliced": reused} for whole, reused in pairs])
    return Found(figures=figures, raw=raw)


def _energy_ways(name: str, device: torch.device, *, is_dry: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """A prompt in full, and with its runs spliced, cut and hashed."""
    num_tokens = 2_048 if is_dry else 8_192
    run_tokens = int(num_tokens * _REUSED) + _SEAM
    policy = msgspec.structs.replace(MOST_REUSE, seam_tokens=_SEAM)
    # The question takes 32 tokens, and the seam is repaired: computed is one token in twenty, with both.
    lookup = make_lookup(
        np.random.default_rng(2), run_tokens, MODELS[name].vocab, 2_000 if is_dry else 200_000,
        header_tokens=num_tokens - run_tokens - 32, policy=policy,
    )  # fmt: skip
    backend = command.make_backend("torch" if is_dry else "triton")
    bench = Bench(name, backend, 2 * num_tokens + 256, torch.bfloat16, device, seed=2)
    plan = lookup.plan()
    if not (_REUSED - 0.01 <= plan.num_spliced / num_tokens <= _REUSED + 0.01 and plan.end == num_tokens):
        raise BenchError(f"{name}: {plan.num_spliced} of {plan.end} tokens are spliced, wanted {_REUSED:.0%}.")
    full, gaps = bench.ways(lookup)
    return full, lambda: lookup.publish(gaps())


def _measure(work: Work, name: str, options: Sequence[str], budget_s: float) -> PrefillResult:
    """`gpu_prefill` for one model; its failures are in the result, what there is of it in a file meanwhile."""
    out = work.folder / f"prefill-{options[1]}-{name}.json"
    model = _DRY_MODELS[name] if work.is_dry else name
    options = ["--model", model, "--device", work.device, "--budget-s", str(budget_s), "--out", str(out), *options]
    if work.is_dry:
        options += ["--share", "0", "0.9", "--runs", "2", "--backend", "torch"]
    result, shown, _ = command.STUDY.find(*options)
    assert isinstance(result, PrefillResult)
    print(shown)
    return result


def _found(figures: dict[str, float], results: Sequence[PrefillResult], notes: Sequence[str] = ()) -> Found:
    return Found(
        figures=figures,
        notes=[*(note for result in results for note in result.left_out), *notes],
        failures=[note for result in results for note in result.failures],
        raw={"results": msgspec.to_builtins(list(results))},
    )
