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
        'Gives the settings that are not set: `"careful"`; `"balanced"`, which compares contexts only in the last 256 '
        'tokens of a prompt; or `"most"`, which splices all equal text, at any position and after any change.',
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
        "Fewest tokens of a run after its seam; a smaller value reuses more, in pieces from many contexts.",
    ] = 64
    tail_tokens: Annotated[
        Length,
        "Tokens at the end of a prompt that are computed unless a donor's context is nearly equal: the answer depends "
        "on them most.",
    ] = 256
    foreign_tokens: Annotated[Length, "Most tokens of a donor's context that the prompt may lack, for the tail."] = 8
    unseen_percent: Annotated[
        Percent, "Largest share of the text before a run, in percent, that a donor's context may lack, for the tail."
    ] = 10
    near_tokens: Annotated[
        Length,
        "Tokens at the end of a prompt in which `near_unseen_percent` applies; at least `tail_tokens`, and none if "
        "that is 0.",
    ] = 1024
    near_unseen_percent: Annotated[
        Percent, "Largest share of the text before a run, in percent, that a donor's context may lack, near the end."
    ] = 40
    # One right answer in six over text in another order was lost in prompts of 1,200 to 3,200 tokens without this.
    far_unseen_percent: Annotated[
        Percent,
        "The same before the last `near_tokens`, where text in another order counts as lacking. With 100, or with "
        "`tail_tokens` 0, nothing is compared there.",
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
        "Donors near the prompt's end with a context that does not fit; after so many no other one is compared there.",
    ] = 32

    edit: Annotated[
        Literal["notes", "in_place", "recompile"],
        'What is computed after a field that has another value than before the donor: `"notes"` the text that is '
        'likely to depend on it, `"recompile"` everything, `"in_place"` nothing, which may answer with the old value.',
    ] = "notes"
    max_field_tokens: Annotated[
        int,
        Range(0, 4096),
        "Longest difference between equal flanks that counts as a changed field; with 0 none does.",
    ] = 128
    edit_tail_tokens: Annotated[
        Length, "Tokens at the end of a prompt that are computed if a field before them changed, with `edit: notes`."
    ] = 32
    max_generation: Annotated[int, Range(0, 1 << 16), "Most changed fields that a donor's rows may depend on."] = 2

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
