"""The start-up check of a gap batch: rows computed around and behind splices must equal those of a full prefill.

The tokens that the batch is given at its runs are wrong ones, so only a pass that splices, computes the gaps alone and
lets them read the spliced rows comes out right. The caller runs the model.
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
    """How far the rows of a gap batch are from those of a full prefill."""

    first: float
    """Relative L2 of the first layer's rows, spliced and computed ones."""
    unread: float
    """Of the computed rows behind splices: the distance from the right rows in units of the distance between the right
    ones and those behind the wrong tokens. Median over tokens, the smallest of the layers behind the first; with one
    layer that of the logits. Rounding and depth blur the last layers at most, a splice that is not read is 1 in all of
    them."""


class GapRows(NamedTuple):
    """The rows of one layer at every position, `[num_tokens, width]` float64: keys and values, or latent rows. Or the
    logits, `[1, vocab_size]`."""

    full: Tensor
    """Computed in full."""
    spliced: Tensor
    """Spliced and computed by the gap batch."""
    misled: Tensor
    """Computed in full with the wrong tokens at the runs."""


def read_rows(view: PoolView, slots: Tensor) -> list[Tensor]:
    """The rows of `slots`, one `[num_tokens, width]` float64 for each layer."""
    layers = (view.read(layer, slots) for layer in range(view.num_layers))
    return [torch.cat([rows.flatten(1) for rows in layer], dim=1) for layer in layers]


def measure_gaps(rows: Sequence[GapRows], behind: Sequence[int], logits: GapRows) -> Tensor:
    """Compare the rows of a gap batch, layer by layer; waits for the device.

    Args:
        rows: of each layer.
        behind: the positions that are computed behind a splice.
        logits: of the last token.

    Returns:
        `[max(2, num_layers)]` float64 on the CPU: `GapErrors.first`, then values whose smallest is `GapErrors.unread`.
    """
    errors = [relative_l2(rows[0].spliced, rows[0].full)]
    deeper = [GapRows(*(part[list(behind)] for part in layer)) for layer in rows[1:]]
    # The rows of a first layer tell nothing of what its attention reads.
    for full, spliced, misled in deeper or [logits]:
        share = (spliced - full).norm(dim=1) / (misled - full).norm(dim=1)
        errors.append(float(share.median()))
    return torch.tensor(errors, dtype=torch.float64).nan_to_num(nan=torch.inf, posinf=torch.inf)


def judge_gaps(errors: Tensor, view: PoolView, backend: str) -> GapErrors:
    """Refuse a server whose gap batches are not what a full prefill is.

    Args:
        errors: what `measure_gaps` returned, the worst of all ranks.
        view: the pool they were measured on.
        backend: the prefill attention backend.

    Raises:
        ContractError: rows are not spliced, or gaps not computed, where they should be.
        UnsupportedError: what is computed behind splices does not depend on them.
    """
    first, limit = float(errors[0]), ROW_LIMITS[view.dtype].first
    if first > limit:
        raise ContractError(
            f"layer {view.start_layer}: rows of a gap batch differ from those of a full prefill by a relative L2 of "
            f"{first:.2g}; allowed is {limit:.2g} for {view.dtype} rows. The forward pass does not execute splices "
            "here: serve without --radix-cache-backend pic."
        )
    unread = float(errors[1:].min())
    if unread > _UNREAD:
        reason = (
            f"tokens behind a splice do not read its rows ({unread:.2g} of the way to rows without the splice; "
            f"allowed is {_UNREAD})"
        )
        refused = Refused(reason, "choose another one with --attention-backend")
        raise UnsupportedError(refused.line(f"the prefill attention backend {backend!r} on this model"))
    return GapErrors(first, unread)
