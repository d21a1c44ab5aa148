"""`ReusePolicy`: every setting that decides which rows are reused, declared once.

The server's configuration, requests, the planner, the census and the benchmarks all use this declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from sglang_pic.settings import Range, check

_MAX_LENGTH = 1 << 20

Length = Annotated[int, Range(0, _MAX_LENGTH)]


class ReusePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which runs are taken and how much of them is computed; for the defaults see bench/results/study/defaults.md."""

    preset: Annotated[
        Literal["careful", "balanced", "most"],
        'Gives the settings that are not set: `"careful"`; `"balanced"`, which computes half as much at the start of '
        'runs and at the end of prompts; or `"most"`, which splices all equal text, in any order and after any change.',
    ] = "careful"
    sink_tokens: Annotated[Length, "Tokens at the start of a prompt whose rows are neither spliced nor donated."] = 32
    seam_tokens: Annotated[
        int,
        Range(0, 1 << 16),
        "Tokens to compute at the start of a run, unless the run continues in its donor's own context.",
    ] = 64
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
        "Tokens at the end of a prompt that are computed, because the answer depends on them most; only rows that were "
        "computed after exactly the same tokens, or that are pinned, are spliced there.",
    ] = 64
    # With 256 MiniSWE's first calls lose as much as without it: study/context.md.
    other_tail_tokens: Annotated[
        Length,
        "The same if a run's donor read a different text before it: more than 128 tokens that the prompt lacks, or "
        "less than half of the prompt's text; at least `tail_tokens`, and 0 if that is 0. A run that begins within "
        "twice this length of the end has half this length computed at its start, if its donor read a different text "
        "or lacks 96 or more of as many tokens before it. Of any run behind text that is gone (more than 128 of the "
        "donor's tokens, and 2.6 for each that the prompt has in their place) all of this length is computed there.",
    ] = 512
    reordered: Annotated[
        Literal["compute", "attend", "splice"],
        "What is done with text in another order than in its donor, or from three other prompts or more, such as "
        'retrieved documents: `"compute"`; `"attend"`, which splices it and in a second pass computes the run that the '
        'end of the prompt attends to most; or `"splice"`, which loses right answers.',
    ] = "compute"

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
    "balanced": {"preset": "balanced", "seam_tokens": 32, "tail_tokens": 32, "other_tail_tokens": 256},
    "most": {
        "preset": "most",
        "seam_tokens": 1,
        "min_spliced_tokens": 8,
        "tail_tokens": 0,
        "reordered": "splice",
        "edit": "in_place",
    },
}
"""The settings of each preset that are not the defaults, from the most careful one to the boldest."""


def has_bolder_preset(policy: ReusePolicy, other: ReusePolicy) -> bool:
    """Whether a policy's preset is bolder than the other's."""
    presets = [*PRESETS]
    return presets.index(policy.preset) > presets.index(other.preset)


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of their preset that are not given; an unknown preset stays, for the struct to refuse."""
    preset = given.get("preset")
    return {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **given}
