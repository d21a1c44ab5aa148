"""Owns the two measurements of `bench-prefill`: gap prefill beside full and prefix-hit prefill, and time to first token
and energy by the length of a run.

It must not know files, tables or the command line. A time is from the call on an idle device to the chosen token on the
host: layout, attention's own plan, splice, pass and logits. Ways that are compared are timed in turns. Passes run
eagerly, as SGLang's prefills do by default; a short one is bound by its launches, on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from pic_bench.gpu_attention import AttentionBackend
from pic_bench.gpu_cases import SHIFT, Lookup, make_lookup, plant, random_tokens
from pic_bench.gpu_energy import Energy, EnergyCounter, measure_energy
from pic_bench.gpu_extend import Extend, gap_extend, whole_extend
from pic_bench.gpu_model import LatentPath, Pool, Skeleton
from pic_bench.gpu_timing import Deadline, Timing, take_turns
from sglang_pic.errors import BenchError

__all__ = ["Bench", "GapTiming", "RunTiming", "time_gaps", "time_runs"]

_LIMIT_S: Final = 2.0
# A pass of 32k tokens takes about 2 s on the slowest backend; five of each way.
_CASE_S: Final = 20.0


class GapTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt with `share` of it in `runs` spliced runs; all ways compute the same answer's place."""

    model: str
    backend: str
    path: str
    """How a latent is attended behind a prefix; the full prefill is always expanded. Empty without a latent."""
    prompt_tokens: int
    share: float
    runs: int
    computed_tokens: int
    spliced_tokens: int
    full: Timing
    prefix: Timing
    """An exact prefix hit that leaves as many tokens to compute."""
    gap: Timing
    """With the splice."""
    splice: Timing
    """Alone."""


class RunTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request with one run, served from it and in full. No HTTP, tokenizer or scheduler is in it."""

    model: str
    backend: str
    path: str
    run_tokens: int
    prompt_tokens: int
    computed_tokens: int
    spliced_tokens: int
    miss: Timing
    """Full prefill, nothing planned, as stock does it."""
    hit: Timing
    """Plan on the index, splice, gaps."""
    plan: Timing
    """Of the hit, on the host, alone."""
    miss_energy: Energy | None
    hit_energy: Energy | None


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """What both measurements need; `slots` `[n]` in random order, as a pool's are after a while."""

    name: str
    model: Skeleton
    pool: Pool
    slots: Tensor
    backend: AttentionBackend
    repeats: int
    seed: int
    deadline: Deadline

    def first_token(self, extend: Extend, path: LatentPath) -> int:
        """The greedy token behind a pass; back when the device is done.

        Raises:
            BenchError: the logits are not finite: a row was read that nobody wrote.
        """
        logits = self.model.forward(extend, self.pool, self.backend, path)
        best = logits.argmax()
        if not bool(torch.isfinite(logits[best])):
            raise BenchError(f"{self.name}, {self.backend.name}: logits are not finite; a row was read unwritten.")
        return int(best)

    def to_device(self, tokens: np.ndarray) -> Tensor:
        """Token ids as a pass takes them."""
        return torch.from_numpy(tokens.astype(np.int64)).to(self.model.device)


def time_gaps(
    bench: Bench, num_tokens: int, shares: list[float], runs: list[int], paths: list[LatentPath]
) -> Iterator[GapTiming]:
    """All shares and numbers of runs of one prompt length; what cannot be planned or timed is noted as left out."""
    where = f"{bench.name}, {bench.backend.name}, {num_tokens:,} tokens"
    if not bench.deadline.has(_CASE_S, where):
        return
    rng = np.random.default_rng(bench.seed)
    donor = random_tokens(rng, num_tokens + SHIFT, bench.model.dims.vocab)
    tokens = bench.to_device(donor[SHIFT:])
    donor_row, row = bench.slots[: len(donor)], bench.slots[len(donor) : len(donor) + num_tokens]
    bench.pool.poison()
    for ids, slots in ((bench.to_device(donor), donor_row), (tokens, row)):
        bench.first_token(whole_extend(ids, slots, 0), LatentPath.EXPANDED)
    for share, num_runs in sorted({(share, num if share else 0) for share in shares for num in runs}):
        planted = plant(donor, num_tokens, SHIFT, share, num_runs)
        what = f"{where}, {share:.0%} in {num_runs} runs"
        if planted.plan is None:
            bench.deadline.left_out.append(f"{what}: {planted.reason}")
            continue
        sources = [donor_row[run.donor_start : run.donor_end] for run in planted.plan.runs]
        # With nothing spliced every way is a full prefill.
        for path in paths if num_runs else [LatentPath.EXPANDED]:
            if bench.deadline.has(_CASE_S, f"{what} {path.value}"):
                lay_out = partial(gap_extend, tokens, row, planted.plan, sources)
                yield _GapCase(bench, tokens, row, path, lay_out).measure(share, num_runs)


class _GapCase:
    """The ways of one case; `lay_out` makes the gap pass, which is part of its time."""

    def __init__(
        self, bench: Bench, tokens: Tensor, row: Tensor, path: LatentPath, lay_out: Callable[[], Extend]
    ) -> None:
        self._bench, self._tokens, self._row, self._path, self._lay_out = bench, tokens, row, path, lay_out
        self._gaps = lay_out()

    def measure(self, share: float, num_runs: int) -> GapTiming:
        bench = self._bench
        ways = [self._full, self._prefix, self._gap, self._splice]
        full, prefix, gap, splice = take_turns(ways, bench.repeats, _LIMIT_S, bench.model.device)
        return GapTiming(
            model=bench.name,
            backend=bench.backend.name,
            path=self._path.value if bench.model.dims.latent else "",
            prompt_tokens=len(self._tokens),
            share=share,
            runs=num_runs,
            computed_tokens=self._gaps.num_tokens,
            spliced_tokens=len(self._tokens) - self._gaps.num_tokens,
            full=full,
            prefix=prefix,
            gap=gap,
            splice=splice,
        )

    def _full(self) -> None:
        self._bench.first_token(whole_extend(self._tokens, self._row, 0), LatentPath.EXPANDED)

    def _prefix(self) -> None:
        prefix_len = len(self._tokens) - self._gaps.num_tokens
        # With nothing in the prefix this is a full prefill.
        path = self._path if prefix_len else LatentPath.EXPANDED
        self._bench.first_token(whole_extend(self._tokens, self._row, prefix_len), path)

    def _gap(self) -> None:
        path = self._path if len(self._gaps.seq_lens) > 1 else LatentPath.EXPANDED
        self._bench.first_token(self._lay_out(), path)

    def _splice(self) -> None:
        splice = self._gaps.splice
        if splice is not None:
            self._bench.pool.splicer.splice(splice.src, splice.dst, splice.shifts)


def time_runs(
    bench: Bench,
    run_tokens: int,
    path: LatentPath,
    index_tokens: int,
    counter: EnergyCounter | None,
    energy_s: float,
) -> RunTiming | None:
    """One length of a run; None, and noted as left out, where no time is left.

    Raises:
        BenchError: the planner did not find the run.
    """
    what = f"{bench.name}, {bench.backend.name}, a run of {run_tokens:,}"
    if not bench.deadline.has(_CASE_S + (2.4 * energy_s if counter else 0), what):
        return None
    lookup = make_lookup(np.random.default_rng(bench.seed), run_tokens, bench.model.dims.vocab, index_tokens)
    request = _Request(bench, lookup, path)
    plan = lookup.plan()
    if plan.num_spliced < run_tokens - 8 or len(plan.runs) != 1:
        raise BenchError(f"{what}: the planner splices {plan.num_spliced} tokens in {len(plan.runs)} runs; not timed.")
    ways: list[Callable[[], object]] = [request.miss, request.hit, lookup.plan]
    miss, hit, planned = take_turns(ways, bench.repeats, _LIMIT_S, bench.model.device)
    energies = [measure_energy(way, counter, energy_s) if counter else None for way in (request.miss, request.hit)]
    return RunTiming(
        model=bench.name,
        backend=bench.backend.name,
        path=path.value if bench.model.dims.latent else "",
        run_tokens=run_tokens,
        prompt_tokens=plan.end,
        computed_tokens=plan.num_computed,
        spliced_tokens=plan.num_spliced,
        miss=miss,
        hit=hit,
        plan=planned,
        miss_energy=energies[0],
        hit_energy=energies[1],
    )


class _Request:
    """One request, from its tokens on the host to its first token on the host."""

    def __init__(self, bench: Bench, lookup: Lookup, path: LatentPath) -> None:
        self._bench, self._lookup, self._path = bench, lookup, path
        num_donor, num_prompt = len(lookup.donor), len(lookup.prompt)
        self._donor_row = bench.slots[:num_donor]
        self._row = bench.slots[num_donor : num_donor + num_prompt]
        bench.pool.poison()
        bench.first_token(whole_extend(bench.to_device(lookup.donor), self._donor_row, 0), LatentPath.EXPANDED)

    def miss(self) -> None:
        bench = self._bench
        bench.first_token(whole_extend(bench.to_device(self._lookup.prompt), self._row, 0), LatentPath.EXPANDED)

    def hit(self) -> None:
        bench = self._bench
        plan = self._lookup.plan()
        sources = [self._donor_row[run.donor_start : run.donor_end] for run in plan.runs]
        bench.first_token(gap_extend(bench.to_device(self._lookup.prompt), self._row, plan, sources), self._path)
