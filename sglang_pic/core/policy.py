"""`ReusePolicy`: every setting that decides which rows are reused, declared once.

The server's configuration, requests, the planner, the census and the benchmarks all use this declaration.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglang_pic.core.settings import Integers, check, setting

__all__ = ["ReusePolicy"]

_LENGTH, _RUN_LENGTH, _PERCENT = Integers(0, 1 << 20), Integers(1, 1 << 20), Integers(0, 100)


class ReusePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which runs are taken and how much of them is computed; lengths are in tokens.

    The searches behind the defaults are in the project's study.
    """

    sink_tokens: Annotated[
        int, setting(_LENGTH, "Tokens at the start of a prompt whose rows are neither spliced nor donated.")
    ] = 32
    seam_tokens: Annotated[
        int,
        setting(
            Integers(0, 1 << 16),
            "Tokens to compute at the start of a run, unless the run continues in its donor's own context.",
        ),
    ] = 32
    # At least 97 in 100 of what repeats in windows of 64 can be recovered on every recorded set; shorter runs bring
    # little more and cost agreement.
    min_run_tokens: Annotated[int, setting(_RUN_LENGTH, "Shortest equal span that is a run.")] = 64
    # What lay between two donors' runs is a donor too, in pieces: a text put together from many contexts answers worse
    # than one that is computed once and then taken whole.
    min_spliced_tokens: Annotated[
        int, setting(_RUN_LENGTH, "Tokens of a run that must be left to splice; fewer reuse more, in smaller pieces.")
    ] = 64
    tail_tokens: Annotated[
        int, setting(_LENGTH, "Tokens at the end of a prompt that are computed unless a donor's context fits closely.")
    ] = 256
    foreign_tokens: Annotated[
        int, setting(_LENGTH, "Tail: most tokens that a donor's context may have and the prompt not.")
    ] = 8
    unseen_percent: Annotated[
        int, setting(_PERCENT, "Tail: largest share of the text before a run that a donor may lack, in percent.")
    ] = 10
    near_tails: Annotated[
        int, setting(Integers(1, 64), "Size of the region near the end of a prompt, in multiples of `tail_tokens`.")
    ] = 4
    near_unseen_percent: Annotated[
        int,
        setting(_PERCENT, "Near the end: largest share of the text before a run that a donor may lack, in percent."),
    ] = 40
    # Text of a short period has a donor at every shift.
    max_misfits: Annotated[
        int, setting(Integers(0, 1 << 16), "Near the end: donors that may turn out not to fit before the search stops.")
    ] = 32

    def __post_init__(self) -> None:
        check(self)
