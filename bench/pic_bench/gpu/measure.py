"""The two measurements of `gpu_prefill`: prefills by share of hits, and first tokens with their energy by run length.

A time is from the call on an idle device to the chosen token on the host: layout, attention's own plan, splice, pass
and logits. Passes run eagerly; a short one is bound by its launches, in every way alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from pic_bench.gpu.attention import AttentionBackend
from pic_bench.gpu.energy import Energy, JouleCounter, measure_energy
from pic_bench.gpu.model import Pool, Skeleton
from pic_bench.gpu.passes import SHIFT, Extend, gap_extend, make_lookup, plant, random_tokens, whole_extend
from pic_bench.gpu.timing import Deadline, Timing, take_turns
from sglang_pic.core import Plan
from sglang_pic.errors import BenchError

_LIMIT_S: Final = 1.0
# A pass of 32k tokens takes about 2 s on the slowest backend; five of each way.
_CASE_S: Final = 20.0


class PrefillTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt in several ways: `full` computes all of it, `gaps` plans or lays out, splices and computes the rest.

    Of a prompt by its share of hits (item gaps) `prefix` is an exact prefix hit that leaves as many tokens to compute,
    `splice` the splice alone. Of a request with one run (item runs) `gaps` is all of the server's work but HTTP,
    tokenizer and scheduler, and `plan` the planner's part of it.
    """

    item: str
    model: str
    backend: str
    prompt_tokens: int
    repeated_tokens: int
    """Of text that was computed before, at another position."""
    runs: int
    computed_tokens: int
    spliced_tokens: int
    ways: dict[str, Timing]
    energy: dict[str, Energy] = {}

    @property
    def share(self) -> float:
        """The share of the prompt that is spliced."""
        return self.spliced_tokens / self.prompt_tokens

    @property
    def speedup(self) -> float:
        """Median time of the full prefill over that of the gaps."""
        return self.ways["full"].p50_ms / self.ways["gaps"].p50_ms


class Bench(NamedTuple):
    """What both measurements need; `slots` `[n]` in random order, as a pool's are after a while."""

    name: str
    model: Skeleton
    pool: Pool
    slots: Tensor
    backend: AttentionBackend
    repeats: int
    seed: int
    deadline: Deadline

    def first_token(self, extend: Extend) -> int:
        """The greedy token behind a pass; back when the device is done.

        Raises:
            BenchError: the logits are not finite: a row was read that nobody wrote.
        """
        logits = self.model.forward(extend, self.pool, self.backend)
        best = logits.argmax()
        if not bool(torch.isfinite(logits[best])):
            raise BenchError(f"{self.name}, {self.backend.name}: logits are not finite; a row was read unwritten.")
        return int(best)

    def timing(self, item: str, plan: Plan, repeated: int, ways: dict[str, Callable[[], object]]) -> PrefillTiming:
        """The ways of one prompt, timed in turns."""
        timings = take_turns([*ways.values()], self.repeats, self.model.device, limit_s=_LIMIT_S)
        return PrefillTiming(
            item=item,
            model=self.name,
            backend=self.backend.name,
            prompt_tokens=plan.end,
            repeated_tokens=repeated,
            runs=len(plan.runs),
            computed_tokens=plan.num_computed,
            spliced_tokens=plan.num_spliced,
            ways=dict(zip(ways, timings, strict=True)),
        )


def time_gaps(bench: Bench, num_tokens: int, shares: list[float], runs: list[int]) -> Iterator[PrefillTiming]:
    """All shares and numbers of runs of one prompt length; cases that cannot be planned or timed are noted."""
    where = f"{bench.name}, {num_tokens:,} tokens"
    if not bench.deadline.has(_CASE_S, where):
        return
    donor = random_tokens(np.random.default_rng(bench.seed), num_tokens + SHIFT, bench.model.dims.vocab)
    tokens = bench.model.to_device(donor[SHIFT:])
    donor_row, row = bench.slots[: len(donor)], bench.slots[len(donor) : len(donor) + num_tokens]
    bench.pool.poison()
    bench.first_token(whole_extend(bench.model.to_device(donor), donor_row, 0))
    bench.first_token(whole_extend(tokens, row, 0))
    for share, num_runs in sorted({(share, num if share else 0) for share in shares for num in runs}):
        plan = plant(donor, num_tokens, SHIFT, share, num_runs)
        what = f"{where}, {share:.0%} in {num_runs} runs"
        if plan is None:
            bench.deadline.left_out.append(f"{what}: the planner makes no runs or gaps as short as these")
        elif bench.deadline.has(_CASE_S, what):
            yield bench.timing("gaps", plan, plan.num_spliced, _ways(bench, tokens, row, plan, donor_row))


def _ways(bench: Bench, tokens: Tensor, row: Tensor, plan: Plan, donor_row: Tensor) -> dict[str, Callable[[], object]]:
    moved = gap_extend(tokens, row, plan, donor_row).splice

    def splice() -> None:
        if moved is not None:
            bench.pool.splicer.splice(moved.src, moved.dst, moved.shifts)

    return {
        "full": lambda: bench.first_token(whole_extend(tokens, row, 0)),
        # Laid out anew every time: the layout is part of the time.
        "gaps": lambda: bench.first_token(gap_extend(tokens, row, plan, donor_row)),
        "prefix": lambda: bench.first_token(whole_extend(tokens, row, plan.num_spliced)),
        "splice": splice,
    }


def time_runs(
    bench: Bench, run_tokens: int, index_tokens: int, joules: JouleCounter | None, energy_s: float
) -> PrefillTiming | None:
    """One length of a run; None, and noted as left out, where no time is left.

    Raises:
        BenchError: the planner did not find the run.
    """
    what = f"{bench.name}, a run of {run_tokens:,}"
    if not bench.deadline.has(_CASE_S + (2.4 * energy_s if joules else 0), what):
        return None
    lookup = make_lookup(np.random.default_rng(bench.seed), run_tokens, bench.model.dims.vocab, index_tokens)
    plan = lookup.plan()
    if plan.num_spliced < run_tokens - 8 or len(plan.runs) != 1:
        raise BenchError(f"{what}: the planner splices {plan.num_spliced} tokens in {len(plan.runs)} runs; not timed.")
    to_device = bench.model.to_device
    donor_row, row, _ = bench.slots.tensor_split((len(lookup.donor), len(lookup.donor) + len(lookup.prompt)))
    bench.pool.poison()
    bench.first_token(whole_extend(to_device(lookup.donor), donor_row, 0))

    def full() -> None:
        bench.first_token(whole_extend(to_device(lookup.prompt), row, 0))

    def gaps() -> None:
        bench.first_token(gap_extend(to_device(lookup.prompt), row, lookup.plan(), donor_row))

    timing = bench.timing("runs", plan, run_tokens, {"full": full, "gaps": gaps, "plan": lookup.plan})
    if joules is None:
        return timing
    energy = {name: measure_energy(way, joules, energy_s) for name, way in (("full", full), ("gaps", gaps))}
    return msgspec.structs.replace(timing, energy=energy)
