"""Chooses the passes that are timed for the cost gate, and turns their times into a `CostModel`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sglang_pic.core.plan import CostModel

logger = logging.getLogger(__name__)

FEW_TOKENS = 16
"""Tokens that the shortest passes compute."""
_GROWTH = 4
_LONG_ENOUGH_US = 100_000.0
"""No longer pass is timed after one of this length: a CPU reaches it with 64 to 256 tokens, an H100 with thousands."""
_MOST = 8_192
SEQUENCES = FEW_TOKENS
"""Gaps of a pass with many: fewer may leave most of a GPU idle while they read a long prefix, and seem free."""
_CONTEXTS = (1_024, 8_192, 32_768)
"""Tokens before the gaps."""
_FAR = _CONTEXTS[1:]
"""Tokens before a long pass: from 8,192 on SGLang projects the latent rows of a prefix to keys and values."""
_ROWS = (256, 2_048)


class Timing(NamedTuple):
    """The minimum of several times, and how far their median is above it, in microseconds."""

    us: float
    noise_us: float

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Timing:
        """The minimum and the spread: other work on a machine can only add to a time."""
        ordered = sorted(times_us)
        return cls(ordered[0], ordered[len(ordered) // 2] - ordered[0])

    def exceeds(self, other: Timing) -> bool:
        """Whether this time is longer than `other` by more than the noise."""
        return self.us - other.us > 2 * max(self.noise_us, other.noise_us)


class GapTimings(NamedTuple):
    """A pass with one gap, a pass with several, both over `FEW_TOKENS`, and the host's work around the first."""

    one: Timing
    many: Timing
    around: Timing

    @property
    def added(self) -> Timing:
        """The time that the gaps after the first add."""
        return Timing(self.many.us - self.one.us, max(self.many.noise_us, self.one.noise_us))


class Stopwatch(Protocol):
    """Times passes of the live model; all ranks return the same times, so that they plan alike."""

    def prefill(self, num_tokens: int, context_len: int = 0) -> Timing:
        """A prefill of `num_tokens` without splices, after `context_len` tokens."""

    def splice(self, num_rows: int) -> Timing:
        """A copy of `num_rows` rows."""

    def gap(self, num_tokens: int, context_len: int = 0) -> Timing:
        """A pass with a gap of `num_tokens` and a run after `context_len` tokens, with the host's work around it."""

    def gaps(self, num_gaps: int, context_len: int) -> GapTimings:
        """Gap batches with one gap and with `num_gaps`, after `context_len` tokens."""


def learn_costs(
    stopwatch: Stopwatch, *, max_tokens: int, max_rows: int, max_gaps: int, max_context: int, max_absorbed: int = 0
) -> CostModel:
    """Time passes and return their costs.

    Args:
        stopwatch: times the passes.
        max_tokens: most tokens of one pass.
        max_rows: most rows of one copy.
        max_gaps: most gaps of one pass, 2 or more.
        max_context: most tokens before the gaps of a pass.
        max_absorbed: most tokens of a sequence with a gap, if passes with gaps have attention of their own: with MLA.
    """
    passes = _time_passes(stopwatch, max_tokens)
    computed_token_us = _token_cost(passes, what="computed token")
    few, shortest = passes[0]
    rows = [(num_rows, stopwatch.splice(num_rows)) for num_rows in sorted({min(n, max_rows) for n in _ROWS})]
    num_gaps = min(SEQUENCES, max_gaps)
    one, many, around = near = stopwatch.gaps(num_gaps, 0)
    floor_us = max(0.0, shortest.us - few * computed_token_us)
    gap_token, *by_context = _gap_token_costs(stopwatch, passes, near, max_context, max_absorbed)
    return CostModel(
        computed_token_us=computed_token_us,
        spliced_token_us=_token_cost(rows),
        gap_us=max(0.0, many.us - one.us) / (num_gaps - 1),
        gap_context_us=_context_cost(stopwatch, near, num_gaps, max_context) / (num_gaps - 1),
        gap_token_us=gap_token * computed_token_us,
        token_context_us=by_context[0],
        gap_token_context_us=by_context[1],
        request_us=around.us,
        floor_us=floor_us,
        gap_floor_us=max(floor_us, one.us - around.us - few * computed_token_us),
    )


def report(cost: CostModel, context_len: int) -> None:
    """Log the costs and the shortest runs that the cost gate accepts; warn if it accepts none."""
    token, gap_token = 1_000 * cost.token_context_us, 1_000 * cost.gap_token_context_us
    by_context = f" ({token:.3g} more for each 1,000 tokens before it, {gap_token:.3g} with gaps)" if gap_token else ""
    costs = (
        f"a computed token takes {cost.computed_token_us:.3g} us{by_context}, a spliced one "
        f"{cost.spliced_token_us:.3g}, a gap {cost.gap_us:.3g} and {1_000 * cost.gap_context_us:.3g} more for each "
        f"1,000 tokens before it, a splice {cost.request_us:.3g}, the shortest pass {cost.floor_us:.4g} and with gaps "
        f"{cost.gap_floor_us:.4g}"
    )
    if cost.shortest_run(context_len) is None:
        logger.warning(
            "sglang_pic: the cost gate will reject every run, up to the context's %d tokens: %s. Nothing will be "
            'spliced; set cost_gate to "off", or to costs of your own, to splice all the same.',
            context_len,
            costs,
        )
        return
    shortest = {n: cost.shortest_run(n) for n in (512, 2_048, 8_192, 32_768) if n <= context_len}
    taken = ", ".join(f"{'none' if run is None else run} of {n}" for n, run in shortest.items())
    logger.info("sglang_pic: cost gate: %s; shortest run worth splicing alone, in tokens: %s", costs, taken)


def _time_passes(stopwatch: Stopwatch, max_tokens: int) -> list[tuple[int, Timing]]:
    """Prefills of growing lengths, until one is long or has as many tokens as one pass may."""
    most = max(2 * FEW_TOKENS, min(max_tokens, _MOST))
    passes = [(FEW_TOKENS, stopwatch.prefill(FEW_TOKENS))]
    while passes[-1][0] < most and (len(passes) < 2 or passes[-1][1].us < _LONG_ENOUGH_US):
        num_tokens = min(passes[-1][0] * _GROWTH, most)
        passes.append((num_tokens, stopwatch.prefill(num_tokens)))
    return passes


def _gap_token_costs(
    stopwatch: Stopwatch, passes: Sequence[tuple[int, Timing]], near: GapTimings, max_tokens: int, max_absorbed: int
) -> tuple[float, float, float]:
    """The costs of a token in a long pass that differ with a gap; those within noise are 0.

    Returns:
        The time of such a pass over that of one without a gap, and what each token before them adds for each of their
        tokens, without a gap and with one.
    """
    fitting = [(n, timing) for n, timing in passes[1:] if n <= max_tokens and timing.us < _LONG_ENOUGH_US]
    if not fitting:
        return 0.0, 0.0, 0.0
    num_tokens, without = fitting[-1]

    def with_gap(context_len: int) -> Timing:
        timing = stopwatch.gap(num_tokens, context_len)
        return timing._replace(us=timing.us - near.around.us)

    within = with_gap(0)
    # A pass as long as the shortest one with gaps waits for launches.
    is_longer = within.exceeds(without) and within.exceeds(near.one)
    added_us, token_us, gap_token_us = within.us - without.us if is_longer else 0.0, 0.0, 0.0
    for context_len in _reachable(_FAR, max_absorbed - num_tokens):
        far, far_within = stopwatch.prefill(num_tokens, context_len), with_gap(context_len)
        token_us = max(0.0, far.us - without.us) / num_tokens / context_len
        more_us = far_within.us - far.us - added_us if far_within.exceeds(far) else 0.0
        gap_token_us = token_us + max(0.0, more_us) / num_tokens / context_len
        if far_within.us > _LONG_ENOUGH_US:
            break
    by_context = (token_us, gap_token_us) if gap_token_us > token_us else (0.0, 0.0)
    return within.us / without.us if is_longer else 0.0, *by_context


def _reachable(contexts: Sequence[int], most: int) -> list[int]:
    """The contexts, ascending, each of at most `most` tokens; none where that is a short one."""
    return sorted({min(each, most) for each in contexts}) if most >= _CONTEXTS[0] else []


def _context_cost(stopwatch: Stopwatch, near: GapTimings, num_gaps: int, max_context: int) -> float:
    """The added time of all gaps but the first for each token before them; 0 if it is within noise."""
    context_len, timings = _CONTEXTS[0], near
    for longer in _reachable(_CONTEXTS, max_context):
        if timings.many.us * (longer / context_len) > _LONG_ENOUGH_US:
            break
        context_len, timings = longer, stopwatch.gaps(num_gaps, longer)
    more, less = timings.added, near.added
    return (more.us - less.us) / context_len if more.exceeds(less) else 0.0


def _token_cost(timings: Sequence[tuple[int, Timing]], *, what: str = "") -> float:
    """The time of a further token in a long pass; warns, if `what` is given, when it is within noise."""
    many, longest = timings[-1]
    mean_us = longest.us / many
    if len(timings) < 2:
        return mean_us
    fewer, long = timings[-2]
    if not longest.exceeds(long):
        if what:
            logger.warning(
                "sglang_pic: the cost of a %s is within noise: %d tokens take %.3g ms, %d take %.3g, give or take "
                "%.2g. The cost gate counts %.3g us, the mean of the longer pass.",
                what,
                fewer,
                long.us / 1e3,
                many,
                longest.us / 1e3,
                2e-3 * max(long.noise_us, longest.noise_us),
                mean_us,
            )
        return mean_us
    if len(timings) > 2 and not long.exceeds(timings[0][1]):
        # The shorter pass waits for launches or weights, so the line through both is too flat.
        return mean_us
    return (longest.us - long.us) / (many - fewer)
