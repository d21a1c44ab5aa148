"""What `gpu_prefill` checks and then measures: prefills by share of hits, first tokens and energy by run length.

Before anything is timed, attention equals float32 on random rows; a prompt whose runs come from its own rows at shift 0
gives the logits of its full prefill, as closely as an exact prefix hit does; rows that nobody wrote are NaN, rows of
another prompt must be seen, and keys that a splice moved are those computed at their position. Random weights make a
deep model amplify every rounding, so the first layers are compared, where wrong rows stand out; the other layers are
the same code.

A time is from the call on an idle device to the chosen token on the host: layout, attention's own plan, splice, pass
and logits. Passes run eagerly; a short one is bound by its launches, in every way alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import numpy as np
import torch
from pic_kernels.numerics import relative_l2
from torch import Tensor

from pic_bench.gpu.clocks import Deadline, Energy, JouleCounter, Timing, measure_energy, take_turns
from pic_bench.gpu.model import MODELS, AttentionBackend, AttentionShape, Pool, Skeleton
from pic_bench.gpu.passes import SHIFT, Extend, Lookup, gap_extend, make_lookup, plant, random_tokens, whole_extend
from sglang_pic.core import Plan, Tokens
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


class Bench:
    """A model, its pool and who attends; `slots` `[n]` are in random order, as a pool's are after a while."""

    def __init__(
        self,
        name: str,
        backend: AttentionBackend,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int = 0,
        repeats: int = 1,
        deadline: Deadline | None = None,
    ) -> None:
        """Draw the weights of the dimensions called `name` and allocate the pool."""
        self.name, self.backend, self.seed, self.repeats = name, backend, seed, repeats
        self.deadline = deadline or Deadline(math.inf)
        self.model = Skeleton(MODELS[name], dtype, device, seed)
        self.pool = Pool(MODELS[name], num_slots, dtype, device)
        self.slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed)).to(device)

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

    def ways(self, lookup: Lookup) -> tuple[Callable[[], object], Callable[[], Plan]]:
        """Compute the prompt that stood before; then compute a request in full, or plan it and compute its gaps."""
        to_device = self.model.to_device
        donor_row, row, _ = self.slots.tensor_split((len(lookup.donor), len(lookup.donor) + len(lookup.prompt)))
        self.pool.poison()
        self.first_token(whole_extend(to_device(lookup.donor), donor_row, 0))

        def full() -> None:
            self.first_token(whole_extend(to_device(lookup.prompt), row, 0))

        def gaps() -> Plan:
            plan = lookup.plan()
            self.first_token(gap_extend(to_device(lookup.prompt), row, plan, donor_row))
            return plan

        return full, gaps

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
) -> Iterator[PrefillTiming]:
    """One length of a run; nothing, and noted as left out, where no time is left.

    Raises:
        BenchError: the planner did not find the run.
    """
    what = f"{bench.name}, a run of {run_tokens:,}"
    if not bench.deadline.has(_CASE_S + (2.4 * energy_s if joules else 0), what):
        return
    lookup = make_lookup(np.random.default_rng(bench.seed), run_tokens, bench.model.dims.vocab, index_tokens)
    plan = lookup.plan()
    if plan.num_spliced < run_tokens - 8 or len(plan.runs) != 1:
        raise BenchError(f"{what}: the planner splices {plan.num_spliced} tokens in {len(plan.runs)} runs; not timed.")
    full, gaps = bench.ways(lookup)
    timing = bench.timing("runs", plan, run_tokens, {"full": full, "gaps": gaps, "plan": lookup.plan})
    if joules is not None:
        energy = {name: measure_energy(way, joules, energy_s) for name, way in (("full", full), ("gaps", gaps))}
        timing = msgspec.structs.replace(timing, energy=energy)
    yield timing


# Operands are rounded to the dtype, and so are the weights before they meet the values.
_ATTENTION_REL_L2: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Gaps beside a prefix hit on the same weights, and their bound where that hit repeats the bits; wrong rows are off by
# 0.3 to 1.
_TIMES_PREFIX_HIT: Final = 4.0
_LOGITS_REL_L2: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Both sides are rounded once: twice what the kernels' table allows one of them.
_MOVED_KEYS_REL_L2: Final = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
_LAYERS: Final = 3
# By how much wrong rows must be further off than right ones.
_TIMES_WRONG: Final = 3.0


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one backend is from the right result, as relative L2."""

    model: str
    backend: str
    layers: int
    """The model's first ones, with its head behind them."""
    tokens: int
    errors: dict[str, float]
    """`attention`, then logits against those of the full prefill: of an exact prefix `hit`, of `gaps` with runs of the
    same prompt's own rows at shift 0, and of the gaps with another prompt's rows (`wrong`), which the check must see;
    `moved keys` of layer 0 against those computed at their position."""


def check_model(bench: Bench, num_tokens: int) -> Check:
    """Compare the first layers; the pool holds three times the tokens and `SHIFT`, and is poisoned after.

    Raises:
        BenchError: something is further off than it may be; the message says what.
    """
    model, pool, backend = bench.model, bench.pool, bench.backend
    part = model.first_layers(_LAYERS)
    attention = max(check_attention(backend, shape, model.device) for shape in model.shapes())

    def logits(extend: Extend) -> Tensor:
        return part.forward(extend, pool, backend)

    rng = np.random.default_rng(7)
    later, foreign = (random_tokens(rng, num_tokens + more, model.dims.vocab) for more in (SHIFT, 0))
    slots = torch.randperm(3 * num_tokens + SHIFT, generator=torch.Generator().manual_seed(7)).to(model.device)
    own, other, far = slots.split((num_tokens, num_tokens, num_tokens + SHIFT))
    tokens, plan = model.to_device(later[SHIFT:]), _planted(later[SHIFT:], num_tokens, 0)
    pool.poison()
    full = logits(whole_extend(tokens, own, 0))
    gap = logits(gap_extend(tokens, other, plan, own))
    # NOTE: the same rows in another order would not do: attention does not see the order of rows.
    logits(whole_extend(model.to_device(foreign), far[:num_tokens], 0))
    wrong = logits(gap_extend(tokens, other, plan, far))
    moved_plan = _planted(later, num_tokens, SHIFT)
    logits(whole_extend(model.to_device(later), far, 0))
    logits(gap_extend(tokens, other, moved_plan, far))
    moved = torch.cat([torch.arange(run.target_start, run.target_end) for run in moved_plan.runs]).to(model.device)
    turned = pool.keys[0][..., model.dims.latent : model.dims.row_dim]
    moved_keys = relative_l2(turned[other[moved]], turned[own[moved]])
    # Last, for it writes rows of the donor again.
    prefix = logits(whole_extend(tokens, own, plan.num_spliced))
    pool.poison()
    errors = {
        "attention": attention,
        "hit": relative_l2(prefix, full),
        "gaps": relative_l2(gap, full),
        "wrong": relative_l2(wrong, full),
        "moved keys": moved_keys,
    }
    check = Check(model=bench.name, backend=backend.name, layers=len(part.layers), tokens=num_tokens, errors=errors)
    _judge(check, model.dtype)
    return check


def check_attention(backend: AttentionBackend, shape: AttentionShape, device: torch.device) -> float:
    """Relative L2 against float32, over gaps of one token and of more than a block, behind short and long prefixes.

    Raises:
        BenchError: further off than the dtype allows, or not finite.
    """
    spans = [(0, 33), (40, 41), (64, 64 + 150), (400, 417)]
    random = torch.Generator(device).manual_seed(3)
    num_slots, num_new = 600, sum(end - start for start, end in spans)
    row = torch.randperm(num_slots, generator=torch.Generator().manual_seed(3))[:417].to(device)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float32, device=device).to(shape.dtype)

    query = draw(num_new, shape.heads, shape.qk_dim) * 3
    keys = draw(num_slots, shape.kv_heads, shape.qk_dim)
    values = None if shape.latent else draw(num_slots, shape.kv_heads, shape.v_dim)
    unused = torch.ones(num_slots, dtype=torch.bool, device=device).index_fill_(0, row, False)
    for buffer in (keys,) if values is None else (keys, values):
        buffer[unused] = float("nan")
    positions = torch.cat([torch.arange(*span, device=device) for span in spans])
    starts, ends = (list(bound) for bound in zip(*spans, strict=True))
    extend = Extend(positions, positions, row, row[positions], starts, ends)
    found = backend.plan(extend, row, shape)(query, keys, values)
    wide_keys, wide_values = (
        part[row].float().repeat_interleave(shape.heads // shape.kv_heads, dim=1)
        for part in (keys, keys[..., : shape.v_dim] if values is None else values)
    )
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide_keys) * shape.scale
    hidden = torch.arange(len(row), device=device)[None, :] > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    error = relative_l2(found, torch.einsum("hqk,khd->qhd", weights, wide_values))
    if not error <= _ATTENTION_REL_L2[shape.dtype]:
        raise BenchError(f"attention backend {backend.name}, {shape}: off by {error:.2g}; nothing was timed.")
    return error


def _planted(donor: Tokens, num_tokens: int, shift: int) -> Plan:
    plan = plant(donor, num_tokens, shift, share=0.8, num_runs=4)
    if plan is None:
        raise BenchError(f"a check of {num_tokens} tokens is too short for 4 runs; take 512 or more.")
    return plan


def share_of_allowed(check: Check, dtype: torch.dtype = torch.bfloat16) -> float:
    """The error of the gaps' logits over what it may be beside an exact prefix hit."""
    return check.errors["gaps"] / max(_TIMES_PREFIX_HIT * check.errors["hit"], _LOGITS_REL_L2[dtype])


def _judge(check: Check, dtype: torch.dtype) -> None:
    hit, gaps, wrong, moved_keys = (check.errors[name] for name in ("hit", "gaps", "wrong", "moved keys"))
    where = f"{check.model}, {check.layers} layers, {check.backend}"
    allowed = max(_TIMES_PREFIX_HIT * hit, _LOGITS_REL_L2[dtype])
    if not gaps <= allowed:
        raise BenchError(f"{where}: gap prefill is off by {gaps:.2g}, allowed {allowed:.2g}; not timed.")
    if not moved_keys <= _MOVED_KEYS_REL_L2[dtype]:
        raise BenchError(f"{where}: moved keys are off by {moved_keys:.2g}; not timed.")
    if not wrong > _TIMES_WRONG * max(gaps, hit):
        raise BenchError(f"{where}: rows of another prompt are off by {wrong:.2g} only, which is not seen; not timed.")
