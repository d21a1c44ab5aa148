"""summary.json of a fidelity run: a cell for every arm and group of prompts, arms compared by prompt."""

from __future__ import annotations

import msgspec

from pic_bench.environment import Environment
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.report.stats import Estimate

CONTROLS = ("full", "retest", "exact")
"""Arms that splice nothing: they stand beside the cells of every kind of donor."""


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that decide which calls are chosen and which figures are marked."""

    min_chunk_hit: int = 256
    """Chunk-hit tokens under the default policy from which a call of a trace counts as one that reuses much."""
    default_policy: str = "default"
    decided_probability: float = 0.5
    """A prompt is decided if the full prefill gives its likeliest token at least this probability."""
    competent_probability: float = 0.3
    """A cell whose prompts have a lower median of that probability is undecided."""
    min_prompts: int = 20
    """With fewer prompts, or sessions of a trace, percentile intervals are too narrow to conclude anything."""


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
    """One arm at one place of an experiment; divergences are from the full prefill, in nats, means over prompts.

    A figure that no record of the cell has is None.
    """

    experiment: Experiment
    dtype: str
    source: str
    group: str
    """Of EDITS, the common properties of these prompts."""
    min_chunk_hit: int
    """Only prompts with so many chunk-hit tokens under the default policy."""
    donors: Donors
    arm: str
    n: int
    num_units: int
    """Units that the intervals draw: what shares text resembles each other."""
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
    recovery: Estimate | None
    """Of EDITS: (s - old) / (new - old), s the log-odds of the new answer against the old one: 0 acts on the old value,
    1 as the full prefill does. None where the answer does not depend on the field."""
    recovery_median: float | None
    recovery_p10: float | None
    prompt_tokens: int
    chunk_hit_tokens: int
    computed_tokens: int
    spliced_of_in_place: float | None
    """Of EDITS: spliced tokens, of those that `in_place` splices; None where it splices none."""
    against_floor: Contrast | None


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """summary.json of a fidelity run."""

    schema_version: int = 3
    model: str
    probes: int
    repeated: int
    """Records of a prompt and arm that a later record replaced."""
    left_out: dict[str, int]
    """Prompts that were not served as meant and are in no record, by experiment and dtype."""
    limits: Thresholds
    config: dict[str, str]
    environment: Environment | None
    cells: list[Cell]
    worst: list[Probe]
    """The prompts whose spliced rows moved the first token's distribution furthest."""
    edits_alike: int
    """Prompts whose full prefills differ too little for anything to be recovered."""
    edits_computed: int
    """Prompts of which no arm spliced anything."""
