"""The items that check and time prefills with no server: gaps, runs, energy.

Decoders of published dimensions with random weights, the server's own planner, layout of gaps and splicer. A model is
checked before it is timed (`check_model`). A time is from the call on an idle device to the chosen token on the host:
plan, layout, attention's own plan, splice, pass and logits, but neither HTTP, tokenizer nor scheduler. Passes run
eagerly; a short one is bound by its launches, in every way alike. On a CPU the dimensions are tiny, and joules are
seconds of the processor.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from statistics import median
from typing import Final

import msgspec
import torch

from pic_bench.gpu.clocks import JouleCounter, joules_each, open_counter, take_turns
from pic_bench.gpu.model import DRY_MODELS, TORCH, Bench
from pic_bench.gpu.model_check import check_model
from pic_bench.gpu.passes import Layout, Request
from pic_bench.gpu.record import Found, Work
from sglang_pic.core import MOST_REUSE
from sglang_pic.errors import UnsupportedError

_MLA, _GQA = "DeepSeek-V2-Lite", "Llama-3.1-8B"
_CHECK_TOKENS: Final = 1_024
# Below the limit, for a case that has begun: a pass of 32k tokens takes about 2 s on the slowest backend.
_SPARE_S: Final = 60.0
_RUN_LENGTHS: Final = (16, 32, 48, 63, 100, 200, 500, 1_000, 1_500, 3_000, 6_000)
_SEAM: Final = 32


class PrefillTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt in several ways, timed in turns.

    The ways are those of `Request`, and `plan`, the planner's part of `gaps`.
    """

    prompt_tokens: int
    repeated_tokens: int
    """Of text that was computed before, at another position."""
    runs: int
    spliced_tokens: int
    ways: dict[str, list[float]]
    """Milliseconds of every call."""

    @property
    def speedup(self) -> float:
        """Median time of the full prefill over that of the gaps."""
        return median(self.ways["full"]) / median(self.ways["gaps"])


def run_gaps(work: Work) -> Found:
    """Both models: checks, then prefills by share of hits. What is wrong is not timed."""
    lengths, repeats = ((512,), 3) if work.is_dry else ((2_048, 8_192, 32_768), 7)
    layouts = [Layout.of_share(length, share, 8) for length in lengths for share in (0.0, 0.5, 0.9, 0.99)]
    found, until = Found(), time.monotonic() - _SPARE_S
    for figure, name in (("gaps_8b", _GQA), ("gaps_mla", _MLA)):
        until += work.limit_s / 2
        # Held by the call alone: the memory of one model is free before the next one is drawn.
        timings = _check_and_time(make_bench(work, name, layouts), layouts, 0, repeats, until, found)
        for timing in timings:
            if timing.repeated_tokens == layouts[-2].num_repeated:
                found.figures[figure] = timing.speedup
    return found


def run_runs(work: Work) -> Found:
    """First tokens of requests with one run, by its length, with a full index."""
    lengths, index_tokens, repeats = ((32, 100, 300), 2_000, 3) if work.is_dry else (_RUN_LENGTHS, 1_600_000, 15)
    layouts = [Layout(run=length) for length in lengths]
    found, until = Found(), time.monotonic() + work.limit_s - _SPARE_S
    timings = _check_and_time(make_bench(work, _MLA, layouts), layouts, index_tokens, repeats, until, found)
    by_length = {timing.repeated_tokens: timing for timing in timings}
    found.figures.update({f"run_{n}": by_length[n].speedup for n in (3_000, 6_000) if n in by_length})
    if len(timings) == len(lengths):
        if (least := break_even(timings)) is None:
            found.notes.append("no length of a run pays")
        else:
            found.figures["break_even"] = least
    return found


def run_energy(work: Work) -> Found:
    """Joules of a prompt computed in full and with 95 % of it spliced, everything that the reuse costs included."""
    joules: JouleCounter = time.process_time
    if not work.is_dry:
        try:
            joules = open_counter(torch.device(work.device))
        except UnsupportedError as error:
            return Found(notes=[str(error)])
    seconds, repeats = (0.1, 1) if work.is_dry else (6.0, 3)
    found = Found()
    # Of the board, with the context open and nothing running; it is never subtracted.
    found.raw["idle_watts"] = joules_each(lambda: time.sleep(0.1), joules, seconds) / 0.1
    for figure, name in (("energy_mla", _MLA), ("energy_8b", _GQA)):
        pairs = _joules(energy_request(work, name), joules, seconds, repeats)
        found.figures[figure] = 1 - median(spliced / full for full, spliced in pairs)
        found.raw[name] = [{"full": full, "spliced": spliced} for full, spliced in pairs]
    return found


def _joules(request: Request, joules: JouleCounter, seconds: float, repeats: int) -> list[list[float]]:
    """Of a prompt in full and with its runs spliced, cut and hashed, in turns: a card that warms up is fair to both."""

    def spliced() -> None:
        request.gaps()
        request.lookup.publish(request.plan)

    return [[joules_each(way, joules, seconds) for way in (request.full, spliced)] for _ in range(repeats)]


def energy_request(work: Work, name: str) -> Request:
    """One token in twenty is computed, the question of 32 and the seam, which is repaired, included."""
    num_tokens, index_tokens = (2_048, 2_000) if work.is_dry else (8_192, 200_000)
    run = int(0.95 * num_tokens) + _SEAM
    layout = Layout(header=num_tokens - run - 32, run=run)
    policy = msgspec.structs.replace(MOST_REUSE, seam_tokens=_SEAM)
    return Request(make_bench(work, name, [layout]), layout, index_tokens, policy)


def break_even(timings: Sequence[PrefillTiming]) -> int | None:
    """The shortest run from which on every measured one is served sooner than computed; None if there is none."""
    longest_first = sorted(timings, key=lambda timing: timing.repeated_tokens, reverse=True)
    paying = list(takewhile(lambda timing: timing.speedup > 1, longest_first))
    return paying[-1].repeated_tokens if paying else None


def _check_and_time(
    bench: Bench, layouts: Sequence[Layout], index_tokens: int, repeats: int, until: float, found: Found
) -> list[PrefillTiming]:
    """Check a model, then time requests while the monotonic clock is before `until`; short prompts come first."""
    timings: list[PrefillTiming] = []
    with _noted(bench.name, found):
        errors = check_model(bench, _CHECK_TOKENS)
        found.figures["gap_error"] = max(found.figures.get("gap_error", 0.0), errors["gaps"] / errors["allowed"])
        found.raw[f"{bench.name}, check"] = errors
        for layout in layouts:
            what = f"{bench.name}, {layout.num_tokens:,} tokens, {layout.num_repeated:,} repeated"
            if time.monotonic() > until:
                found.notes.append(f"{what}: no time left")
                continue
            with _noted(what, found):
                request = Request(bench, layout, index_tokens)
                ways = {"full": request.full, "gaps": request.gaps, "prefix": request.prefix}
                timing = PrefillTiming(
                    prompt_tokens=layout.num_tokens,
                    repeated_tokens=layout.num_repeated,
                    runs=len(request.plan.runs),
                    spliced_tokens=request.plan.num_spliced,
                    ways=take_turns(ways | {"plan": request.lookup.plan}, repeats, bench.device),
                )
                print(f"{what}: {timing.speedup:.2f} x", flush=True)
                timings.append(timing)
    found.raw[bench.name] = msgspec.to_builtins(timings)
    return timings


@contextmanager
def _noted(what: str, found: Found) -> Iterator[None]:
    """What the block raises is a failure of the item, and ends the block alone."""
    try:
        yield
    except Exception as error:
        # Compilers and drivers raise anything; the other cases are still worth their time.
        traceback.print_exc()
        found.failures.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")


def make_bench(work: Work, name: str, layouts: Sequence[Layout]) -> Bench:
    """A model of the dimensions called `name`, or of tiny ones of its kind, with slots for the longest prompt."""
    # The prompt before it is longer, by its header and by delimiters; the check takes four times its own.
    num_slots = max(4 * _CHECK_TOKENS, *(2 * layout.num_tokens + 256 for layout in layouts))
    device = torch.device(work.device)
    if work.is_dry:
        # Interpreted, the kernel would take minutes.
        return Bench(DRY_MODELS[name], TORCH, num_slots, torch.bfloat16, device)
    from pic_bench.gpu.attention_triton import TRITON

    return Bench(name, TRITON, num_slots, torch.bfloat16, device)
