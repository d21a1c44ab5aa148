"""The start-up check of a gap batch: rows computed around and after splices must equal those of a full prefill.

The batch gets wrong tokens at its runs, so its rows are right only if the pass splices, computes only the gaps, and
their attention reads the spliced rows. The caller runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from pic_kernels.numerics import relative_l2
from torch import Tensor

from sglang_pic.errors import ContractError, Refused, UnsupportedError
from sglang_pic.runtime.checks.moved_rows import ROW_LIMITS
from sglang_pic.runtime.views import PoolView

# Healthy on the CPU platform, 2026-11: tiny-gqa 4e-5 (float32) and 0.07 (fp8_e4m3), tiny-mla 0.009, SmolLM2 0.04 and as
# MLA 0.06 (bfloat16), SmolLM2 0.19 (fp8_e4m3). Without the prefix they are 1.1 to 2.0.
_UNREAD: Final = 0.5
"""Largest allowed `GapErrors.unread`: above it the rows did not read the spliced rows."""


class GapErrors(NamedTuple):
    """Errors of the rows of a gap batch against those of a full prefill."""

    first: float
    """Relative L2 of the first layer's rows, spliced and computed ones."""
    unread: float
    """How little the computed rows after splices depend on them: their distance from the right rows over the distance
    of rows after the wrong tokens. Median over tokens, the smallest of all layers but the first; with one layer that of
    the logits. It is 1 in all layers if splices are not read; rounding raises it in the last layers only."""


class GapRows(NamedTuple):
    """The rows of one layer at every position, `[num_tokens, width]` float64, or the logits, `[1, vocab_size]`."""

    full: Tensor
    """Computed in full."""
    spliced: Tensor
    """Of the gap batch."""
    misled: Tensor
    """Computed in full with the wrong tokens at the runs."""


def read_rows(view: PoolView, slots: Tensor) -> list[Tensor]:
    """The rows of `slots`, one `[num_tokens, width]` float64 for each layer."""
    layers = (view.read(layer, slots) for layer in range(view.num_layers))
    return [torch.cat([rows.flatten(1) for rows in layer], dim=1) for layer in layers]


def measure_gaps(rows: Sequence[GapRows], behind: Sequence[int], logits: GapRows) -> Tensor:
    """Compare the rows of a gap batch, layer by layer; waits for the device.

    Args:
        rows: each layer's.
        behind: the positions that are computed after a splice.
        logits: the last token's.

    Returns:
        `[max(2, num_layers)]` float64 on the CPU: `GapErrors.first`, then values whose smallest is `GapErrors.unread`.
    """
    errors = [relative_l2(rows[0].spliced, rows[0].full)]
    deeper = [GapRows(*(part[list(behind)] for part in layer)) for layer in rows[1:]]
    # The rows of a first layer do not depend on its attention.
    for full, spliced, misled in deeper or [logits]:
        share = (spliced - full).norm(dim=1) / (misled - full).norm(dim=1)
        errors.append(float(share.median()))
    return torch.tensor(errors, dtype=torch.float64).nan_to_num(nan=torch.inf, posinf=torch.inf)


def judge_gaps(errors: Tensor, view: PoolView, backend: str) -> GapErrors:
    """Refuse a server whose gap batches differ from a full prefill.

    Args:
        errors: from `measure_gaps`, the worst of all ranks.
        view: the pool they were measured on.
        backend: the prefill attention backend.

    Raises:
        ContractError: rows are not spliced, or gaps not computed.
        UnsupportedError: rows computed after splices do not depend on them.
    """
    first, limit = float(errors[0]), ROW_LIMITS[view.dtype].first
    if first > limit:
        raise ContractError(
            f"layer {view.start_layer}: rows of a gap batch differ from those of a full prefill by a relative L2 of "
            f"{first:.2g}; allowed is {limit:.2g} for {view.dtype} rows. The forward pass does not execute splices: "
            "start without --radix-cache-backend pic."
        )
    unread = float(errors[1:].min())
    if unread > _UNREAD:
        reason = (
            f"tokens after a splice do not read its rows ({unread:.2g} of the way to rows without the splice; "
            f"allowed is {_UNREAD})"
        )
        refused = Refused(reason, "choose another one with --attention-backend")
        raise UnsupportedError(refused.line(f"the prefill attention backend {backend!r} on this model"))
    return GapErrors(first, unread)
