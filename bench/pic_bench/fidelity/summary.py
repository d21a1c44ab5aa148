"""summary.json of a fidelity run: a cell for every arm and place in the experiment, and arms compared by prompt."""

from __future__ import annotations

import msgspec

from pic_bench.environment import Environment
from pic_bench.fidelity.record import Donors, Edit, Experiment
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
    competent_score: float = 0.2
    """Questions on which the full prefill has a lower mean score are beyond the model."""
    min_prompts: int = 20
    """With fewer prompts, or sessions of a trace, percentile intervals are too narrow to conclude anything."""


class Contrast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm less another on the prompts of both: means of the differences by prompt."""

    baseline: str
    n: int
    unpaired: int
    """Prompts that one of the two arms lacks; they are left out."""
    kl: Estimate
    top1: Estimate
    forced_kl: Estimate | None
    computed_share: Estimate | None
    """Computed tokens of the arm / of the baseline, both summed over the prompts."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in the experiments something was measured, and under which arm."""

    experiment: Experiment
    dtype: str
    source: str
    num_blocks: int | None
    """Of a cell None for questions and traces, whose prompts differ in it."""
    donors: Donors
    shift: int | None
    """None but in the shift experiment."""
    arm: str

    @property
    def seam(self) -> int | None:
        """The seam tokens that the arm's name says."""
        return seam_of(self.arm)


class Cell(Place, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm at one place of the experiment; divergences are from the full prefill, in nats."""

    min_chunk_hit: int = 0
    """Only prompts with so many chunk-hit tokens under the default policy."""
    n: int
    num_units: int | None = None
    """Units that the intervals draw: sessions of a trace, elsewhere prompts."""
    kl: Estimate
    kl_median: Estimate
    kl_p95: float
    kl_max: float
    cosine: Estimate
    top1: Estimate
    top1_decided: Estimate | None
    """Over the decided prompts only."""
    top1_probability: float
    """Median over the prompts of the full prefill's likeliest token's probability."""
    undecided: bool
    """That median is too low for agreement to say much."""
    forced_kl: Estimate | None
    perplexity: Estimate | None
    """Exponential of the mean over prompts of the gold continuation's negative log-likelihood."""
    full_perplexity: float | None
    """The full prefill's on the same prompts."""
    perplexity_ratio: Estimate | None
    """The arm's / the full prefill's, paired by prompt."""
    agreed_tokens: Estimate | None
    """Median of the greedy tokens before the first that differs."""
    agrees_to_end: Estimate | None
    """Share of prompts whose greedy tokens are all the same."""
    score: Estimate | None
    exact_match: Estimate | None
    full_score: float | None
    """The full prefill's on the same prompts."""
    score_change: Estimate | None
    """The arm's less the full prefill's, paired by prompt."""
    incompetent: bool
    """The questions are beyond the model: the full prefill does not answer them either."""
    key_error: Estimate | None
    prompt_tokens: int
    prefix_hit_tokens: int
    chunk_hit_tokens: int
    block_tokens: int = 0
    computed_tokens: int
    against_floor: Contrast | None

    @property
    def place(self) -> int | None:
        """Where in the experiment: a shift, a number of blocks."""
        return self.num_blocks if self.shift is None else self.shift

    @property
    def says_little(self) -> bool:
        """Whether the full prefill itself is not competent here, so that agreement with it says little."""
        return self.undecided or self.incompetent

    @property
    def share_of_exact(self) -> Estimate | None:
        """Computed tokens, of those with exact hits alone; None where these are not the floor."""
        against = self.against_floor
        return against.computed_share if against is not None and against.baseline == "exact" else None


class Comparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KL of two arms on the same prompts, over all places of an experiment; a prompt counts once."""

    what: str
    where: str
    """Dtype, experiment and donors."""
    n: int
    num_units: int
    """Independent texts, which the interval draws."""
    first: float
    second: float
    """Mean KL of either arm."""
    difference: Estimate
    higher: float
    """Share of prompts on which the first arm's KL is higher."""


class Drift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One conversation under one policy, turn by turn."""

    dtype: str
    source: str
    """How the field changes."""
    arm: str
    kl: list[float]
    """Of the first token."""
    forced_kl: list[float]
    """Mean over the recorded answer's positions."""
    prompt_tokens: list[int]
    chunk_hit_tokens: list[int]
    computed_tokens: list[int]
    top1: float
    """Share of the turns whose likeliest first token is the full prefill's."""


class Worst(Place, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt whose spliced rows moved the first token's distribution furthest."""

    prompt: str
    kl: float
    floor_kl: float | None
    top1_agrees: bool
    top1_probability: float
    prompt_tokens: int
    chunk_hit_tokens: int
    text: str | None


class EditCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm on a group of the prompts of EDITS whose field matters, or on those where it does not."""

    dtype: str
    group: str
    """What the prompts were grouped by."""
    at: str
    """The group."""
    arm: str
    n: int
    num_templates: int
    recovery: Estimate | None
    """Mean of (s - old) / (new - old), of the log-odds of the new answer against the old: 0 acts on the old value, 1 as
    the full prefill does. None where the answer does not depend on the field."""
    recovery_median: float | None
    recovery_p10: float | None
    kl: Estimate
    kl_max: float
    computed_share: float
    """Of all prompt tokens."""
    spliced_share: float
    spliced_of_in_place: float | None
    """Spliced tokens, of those that `in_place` splices; None where it splices none."""


class EditCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt of EDITS under all policies."""

    dtype: str
    prompt: str
    edit: Edit
    gap: float | None
    """Between the log-odds of the two full prefills, in nats."""
    recovery: dict[str, float]
    """By policy."""
    kl: dict[str, float]


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """summary.json of a fidelity run."""

    schema_version: int = 1
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
    comparisons: list[Comparison]
    drifts: list[Drift] = []
    worst: list[Worst]
    edits: list[EditCell] = []
    edit_cases: list[EditCase] = []
    edits_alike: int = 0
    """Prompts whose full prefills differ too little for anything to be recovered."""
    edits_computed: int = 0
    """Prompts of which no arm spliced anything."""


def seam_of(arm: str) -> int | None:
    """The seam tokens that an arm's name says: `seam-8` is 8; None for any other arm."""
    word, _, number = arm.partition("-")
    return int(number) if word == "seam" and number.isdecimal() else None
