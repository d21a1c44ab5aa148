"""`ReusePolicy`: every setting that decides which rows are reused, declared once.

The server's configuration, requests, the planner, the census and the benchmarks all use this declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from sglang_pic.core.settings import Range, check

_MAX_LENGTH = 1 << 20

Length = Annotated[int, Range(0, _MAX_LENGTH)]
Percent = Annotated[int, Range(0, 100)]


class ReusePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which runs are taken and how much of them is computed; for the defaults see bench/results/study/defaults.md."""

    preset: Annotated[
        Literal["careful", "balanced", "most"],
        'Where the settings come from that are not given: `"careful"`; `"balanced"`, which compares contexts in the '
        'last 256 tokens of a prompt alone; or `"most"`, which splices whatever is equal, wherever it stands and '
        "whatever changed before it.",
    ] = "careful"
    sink_tokens: Annotated[Length, "Tokens at the start of a prompt whose rows are neither spliced nor donated."] = 32
    seam_tokens: Annotated[
        int,
        Range(0, 1 << 16),
        "Tokens to compute at the start of a run, unless the run continues in its donor's own context.",
    ] = 32
    # At least 97 in 100 of what repeats in windows of 64 can be recovered on every recorded set; shorter runs bring
    # little more and cost agreement.
    min_run_tokens: Annotated[int, Range(1, _MAX_LENGTH), "Shortest equal span that is a run."] = 64
    # Gaps between runs become donors too: a text pieced together from many contexts answers worse than one that is
    # computed once and then spliced whole.
    min_spliced_tokens: Annotated[
        int,
        Range(1, _MAX_LENGTH),
        "Fewest tokens of a run that must be left to splice; fewer reuse more, in pieces from many contexts.",
    ] = 64
    tail_tokens: Annotated[
        Length,
        "Tokens at the end of a prompt that are computed unless a donor's context fits closely: the answer depends on "
        "them most.",
    ] = 256
    foreign_tokens: Annotated[
        Length, "Most tokens that a donor's context may have and the prompt not, for the tail."
    ] = 8
    unseen_percent: Annotated[
        Percent, "Largest share of the text before a run, in percent, that a donor's context may lack, for the tail."
    ] = 10
    near_tokens: Annotated[
        Length,
        "Tokens at the end of a prompt that are near it, where contexts are compared at all; at least `tail_tokens`, "
        "and none where these are 0.",
    ] = 1024
    near_unseen_percent: Annotated[
        Percent, "Largest share of the text before a run, in percent, that a donor's context may lack, near the end."
    ] = 40
    # One right answer in six over text in another order was lost in prompts of 1,200 to 3,200 tokens without this.
    far_unseen_percent: Annotated[
        Percent,
        "The same in front of what is near, where another order counts as lacking: text in another order is computed. "
        "With 100, or with a tail of 0, nothing is compared there.",
    ] = 40
    # Recorded agents lose next to nothing by it; documents in another order lose right answers without it.
    reordered_percent: Annotated[
        Percent,
        "Largest share of a donor's context, in percent, that may be after the run in the prompt: documents, tools or "
        "files in another order are computed. 100, or a tail of 0, allows any order.",
    ] = 10
    # Text of a short period has a donor at every shift.
    max_misfits: Annotated[
        int,
        Range(0, 1 << 16),
        "Donors near the end whose context may turn out not to fit; after so many, all others there are taken not to.",
    ] = 32

    edit: Annotated[
        Literal["notes", "in_place", "recompile"],
        'What is computed behind a field that has another value than it had before the donor: `"notes"` what is likely'
        ' to have drawn on the field, `"recompile"` everything, `"in_place"` nothing, which may answer with the old '
        "value.",
    ] = "notes"
    max_field_tokens: Annotated[
        int,
        Range(0, 4096),
        "Longest difference between equal flanks that is a changed field; 0 takes no difference for one.",
    ] = 128
    edit_tail_tokens: Annotated[
        Length, "Tokens at the end of a prompt that are computed where a field before them changed, with `edit: notes`."
    ] = 32
    max_generation: Annotated[
        int, Range(0, 1 << 16), "Most changed fields that a donor's rows may have behind them."
    ] = 2

    def __post_init__(self) -> None:
        check(self)


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "careful": {},
    # Four models lose at most .006 nats a token on agents' calls, more where text is in another order: study/models.md.
    "balanced": {"preset": "balanced", "tail_tokens": 64, "near_tokens": 256, "far_unseen_percent": 100},
    "most": {"preset": "most", "seam_tokens": 1, "min_spliced_tokens": 8, "tail_tokens": 0, "edit": "in_place"},
}
"""The settings of each preset that are not the defaults, from the most careful one to the boldest."""


def has_bolder_preset(policy: ReusePolicy, other: ReusePolicy) -> bool:
    """Whether a policy's preset is bolder than the other's."""
    return _boldness(policy) > _boldness(other)


def _boldness(policy: ReusePolicy) -> int:
    return list(PRESETS).index(policy.preset)


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of their preset that are not given; an unknown preset stays, for the struct to refuse."""
    preset = given.get("preset")
    return {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **given}
