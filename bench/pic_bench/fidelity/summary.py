"""summary.json of a fidelity run: a cell for every arm on every choice of calls, arms compared by call."""

from __future__ import annotations

import msgspec

from pic_bench.environment import Environment
from pic_bench.fidelity.record import Probe
from pic_bench.report.stats import Estimate


class Flips(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Forced tokens of which the full prefill is sure, and how many of them another token is likeliest for."""

    flips: int
    tokens: int


class Contrast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm less another on the prompts of both: means of the differences by prompt."""

    baseline: str
    n: int
    unpaired: int
    """Prompts that one of the two arms lacks; they are left out."""
    kl: Estimate
    top1: Estimate
    computed_share: float | None
    """Computed tokens of the arm / of the baseline, both summed over the prompts."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm on calls of one trace; divergences are from the full prefill, in nats, means over prompts.

    A figure that no record of the cell has is None.
    """

    dtype: str
    source: str
    min_chunk_hit: int
    """Only prompts with so many chunk-hit tokens under the default policy."""
    arm: str
    n: int
    num_units: int
    """Sessions, which the intervals draw: their calls resemble each other."""
    kl: Estimate
    kl_median: float
    kl_p95: float
    kl_max: float
    cosine: Estimate
    top1: Estimate
    top1_decided: Estimate | None
    undecided: bool
    """The median probability of the full prefills' likeliest token is too low for agreement to say much."""
    forced_kl: Estimate | None
    forced_agreement: Estimate | None = None
    sure: Flips | None = None
    nll_change: Estimate | None
    """Mean negative log-likelihood of the gold continuation, less the full prefill's."""
    prompt_tokens: int
    chunk_hit_tokens: int
    computed_tokens: int
    against_floor: Contrast | None


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """summary.json of a fidelity run."""

    schema_version: int = 4
    model: str
    probes: int
    repeated: int
    """Records of a prompt and arm that a later record replaced."""
    min_chunk_hit: int
    """Chunk-hit tokens under the default policy from which a call counts as one that reuses much."""
    config: dict[str, str]
    environment: Environment | None
    cells: list[Cell]
    worst: list[Probe]
    """The prompts whose spliced rows moved the first token's distribution furthest."""
