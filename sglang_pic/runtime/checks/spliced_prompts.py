"""The measures and the verdict of the start-up self-test: does this model take splices?

The caller runs the prompts and says which rows and logits are to be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
import torch
from pic_kernels.numerics import relative_l2
from torch import Tensor

from sglang_pic.runtime.checks.moved_rows import ROW_LIMITS
from sglang_pic.runtime.divergence import kl_and_differs
from sglang_pic.runtime.splice import Splicer


class Outcome(Enum):
    """How the self-test ended."""

    PASSED = "passed"
    FAILED = "failed"
    """Something was over its limit; `SelfTest.is_exact` says of which kind."""
    SKIPPED = "skipped"
    """The test was on, but could not run here."""
    OFF = "off"


class Comparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How spliced prompts compare with the same prompts computed in full."""

    kl_nats: float
    """KL(full || spliced) of the first token over the whole vocabulary, mean over prompts."""
    same_top1: int
    """Prompts whose likeliest first token is the same."""
    first_key_error: float
    """Relative L2 of the spliced keys' rotary part in the first layer, the largest over prompts. No context
    reaches that layer, so only the splice itself can be wrong there."""
    key_error: float
    """Relative L2 of the spliced keys' rotary part, mean over layers, the largest over prompts."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three experiments."""

    num_prompts: int
    moved: Comparison
    """The donor is the prompt itself at another position: only rounding may differ, whatever the model is."""
    reordered: Comparison
    """The donor has another context: shows whether the model takes splices."""
    naive: Comparison
    """The same donor with its keys left unrotated: shows what ignoring positions costs. Not judged."""
    elsewhere_kl_nats: float
    """KL(full || full at another position), mean over prompts: what this model makes of a position without a splice."""


class SelfTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result, as it stands in the log and in `/server_info`."""

    verdict: Outcome
    reasons: tuple[str, ...] = ()
    """What was over which limit and what to do, or why the test was skipped."""
    is_exact: bool = True
    """Whether the splices that must equal a full prefill but for rounding do so. No server starts without that; the
    other limits are about how the model takes rows from another context, which is the operator's choice."""
    measured: Measured | None = None
    """`None` where nothing was measured."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether everything was measured and within its limits."""
        return self.verdict is Outcome.PASSED


class OperatorLimits(NamedTuple):
    """The limits of `reordered`, which the configuration sets."""

    kl_nats: float
    key_error: float


# Mean KL of moved prompts on the CPU platform, 2026-11, of a right splice and of wrong ones:
#              healthy: SmolLM2, tiny-gqa, tiny-mla     base a tenth off    mscale twice
#   bfloat16            1.6e-3   2.9e-3    1.0e-2       1.3   2.8   1.9     2.9e-2 ... 0.97
# The limits of keys are sharper, so these only have to catch what is wrong behind the keys. A deep model differs more
# between positions without any splice, so the limit is a multiple of that where it is larger, up to what a fault is.
MOVED_KL_LIMITS: Final[Mapping[torch.dtype, float]] = MappingProxyType(
    {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1, torch.float8_e4m3fn: 5e-1}
)
"""Nats allowed where a prompt is spliced from itself at another position, by the dtype of its KV rows."""
_TIMES_ELSEWHERE: Final = 4.0
_MOVED_KL_CEILING: Final = 1.0

# Stands for NaN and infinity, which JSON does not have; `/server_info` is JSON.
_BEYOND_MEASURE: Final = 1e9


class PromptPass(NamedTuple):
    """What one pass over a prompt gave."""

    logits: Tensor
    """`[vocab_size]` of the first token."""
    slots: Tensor
    """`[n]` int64: the rows of the positions that are spliced, in order."""


def measure_prompt(splicer: Splicer, full: PromptPass, spliced: PromptPass) -> Tensor:
    """Compare a spliced prompt with the same prompt computed in full; waits for the device.

    Returns:
        `[4]` float64 on the CPU: KL, whether the likeliest token differs, key error of the first layer and mean key
        error over layers; very large where something is not a number.
    """
    view, errors = splicer.view, []
    for layer in range(view.num_layers):
        turns = splicer.rotary_part(layer)
        want, got = (view.read(layer, each.slots)[0][..., turns] for each in (full, spliced))
        errors.append(relative_l2(got, want))
    kl, differs = kl_and_differs(full.logits, spliced.logits)
    measured = torch.tensor((float(kl), float(differs), errors[0], sum(errors) / len(errors)), dtype=torch.float64)
    return measured.nan_to_num(nan=_BEYOND_MEASURE, posinf=_BEYOND_MEASURE).clamp(max=_BEYOND_MEASURE)


def judge_prompts(measured: Tensor, limits: OperatorLimits | None, *, dtype: torch.dtype, seconds: float) -> SelfTest:
    """The result of the self-test.

    Args:
        measured: `[num_prompts, 4, 4]`: per prompt what `measure_prompt` returned moved, reordered, naive and computed
            in full at another position, whose keys count for nothing.
        limits: of `reordered`; `None` where the prompts are not text, so that only `moved` is judged, and what is
            exact in any case.
        dtype: of the KV rows.
        seconds: how long it took.
    """
    moved, reordered, naive, elsewhere = (_summary(measured[:, number]) for number in range(4))
    rows, dtype_name = ROW_LIMITS[dtype], str(dtype).removeprefix("torch.")
    moved_kl = min(_MOVED_KL_CEILING, max(MOVED_KL_LIMITS[dtype], _TIMES_ELSEWHERE * elsewhere.kl_nats))
    not_exact = (
        f"for {dtype_name} rows. Rows are not moved as this model needs it: serve it without --radix-cache-backend pic"
    )
    not_taken = (
        "Answers on spliced prompts differ from computed ones: serve it without --radix-cache-backend pic, or set"
    )
    # NOTE: keys of deeper layers differ between positions without a splice too, as far as rounding grows with depth.
    checks = [
        (moved.first_key_error, rows.first, "first-layer keys of moved prompts: relative L2", not_exact),
        (moved.kl_nats, moved_kl, "moved prompts: KL of the first token", not_exact),
        (reordered.first_key_error, rows.first, "first-layer keys of reordered blocks: relative L2", not_exact),
    ]
    is_exact = all(value <= limit for value, limit, *_ in checks)
    if limits is not None:
        keys_then = f"(unrotated {naive.key_error:.3g}). {not_taken} self_test_key_limit"
        kl_then = f"nats (unrotated {naive.kl_nats:.3g}). {not_taken} self_test_kl_limit"
        checks += [
            (reordered.key_error, limits.key_error, "keys of reordered blocks: relative L2", keys_then),
            (reordered.kl_nats, limits.kl_nats, "reordered blocks: KL of the first token", kl_then),
        ]
    # The first check that fails gives the reason; those behind it follow from it or say less.
    over = [
        f"{what} {value:.3g}, allowed is {limit:.3g} {then}." for value, limit, what, then in checks if value > limit
    ]
    return SelfTest(
        verdict=Outcome.FAILED if over else Outcome.PASSED,
        reasons=tuple(over),
        is_exact=is_exact,
        measured=Measured(
            num_prompts=len(measured),
            moved=moved,
            reordered=reordered,
            naive=naive,
            elsewhere_kl_nats=elsewhere.kl_nats,
        ),
        seconds=seconds,
    )


def _summary(measured: Tensor) -> Comparison:
    return Comparison(
        kl_nats=float(measured[:, 0].mean()),
        same_top1=int((measured[:, 1] == 0).sum()),
        first_key_error=float(measured[:, 2].max()),
        key_error=float(measured[:, 3].max()),
    )
