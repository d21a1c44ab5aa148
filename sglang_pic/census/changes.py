"""Finds the old value of a changed field on the donor's path."""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from pic_traces.encode.encoded import Tokens

from sglang_pic.census.outcome import ChangedField
from sglang_pic.core import Context, Plan

# Text beside a field that is equal on both sides. The planner asks for as many tokens in front of a field.
_FLANK_TOKENS = 8
# How far from its place a field is looked for, because fields before it may have changed their lengths.
_REACH = 2048
_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


def changed_fields(plan: Plan, prompt: Tokens, expected: Tokens) -> tuple[ChangedField, ...]:
    """The plan's changed fields, each with the value it had in the context of the first run after it.

    Args:
        plan: the prompt's plan.
        prompt: the prompt's tokens.
        expected: how an earlier path continues after the prefix; used if no run is left after a field.
    """
    behind = [run for run in plan.runs if run.context is Context.CHANGED]
    neighbor = np.concatenate([prompt[: plan.prefix_len], expected])
    found = []
    for start, end in plan.changed_fields:
        contexts = ((run.donor.tokens(run.donor_start), run.shift) for run in behind if run.target_start >= end)
        olds = (_old_value(context, shift, prompt, start, end) for context, shift in chain(contexts, [(neighbor, 0)]))
        found.append(ChangedField(start, end, next((old for old in olds if old is not None), _NO_TOKENS)))
    return tuple(found)


def _old_value(context: Tokens, shift: int, prompt: Tokens, start: int, end: int) -> Tokens | None:
    """The tokens between the field's flanks in another context; None if the flanks are not found there."""
    before, after = prompt[max(0, start - _FLANK_TOKENS) : start], prompt[end : end + _FLANK_TOKENS]
    wanted = start - shift
    starts = _places(before, context, wanted - len(before)) + len(before)
    if len(starts) == 0:
        return None
    # Of several places the one nearest to the field's own, as far as the run was moved.
    old_start = int(starts[np.abs(starts - wanted).argmin()])
    ends = _places(after, context, old_start)
    ends = ends[ends >= old_start]
    return context[old_start : ends[0]] if len(ends) else None


def _places(part: Tokens, whole: Tokens, middle: int) -> npt.NDArray[np.int64]:
    """Positions of `part` in `whole`, at most `_REACH` tokens from a given one."""
    low = max(0, middle - _REACH)
    near = whole[low : middle + _REACH + len(part)]
    if len(near) < len(part):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero((sliding_window_view(near, len(part)) == part).all(axis=1)) + low
