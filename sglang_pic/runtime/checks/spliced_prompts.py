"""The measures and the verdict of the start-up self-test of splices. The caller runs the prompts."""

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
    """A limit was exceeded; `SelfTest.is_exact` says of which kind."""
    SKIPPED = "skipped"
    """The test could not run on this server."""
    OFF = "off"


class Comparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spliced prompts compared with the same prompts computed in full."""

    kl_nats: float
    """KL(full || spliced) of the first token over the whole vocabulary, mean over prompts."""
    same_top1: int
    """Prompts whose likeliest first token is the same."""
    first_key_error: float
    """Relative L2 of the spliced keys' rotary part in the first layer, the largest over prompts. That layer does not
    depend on the context, so only a wrong splice raises it."""
    key_error: float
    """Relative L2 of the spliced keys' rotary part, mean over layers, the largest over prompts."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three experiments."""

    num_prompts: int
    moved: Comparison
    """The donor is the prompt itself at another position: only rounding may differ with any model."""
    reordered: Comparison
    """The donor has another context: shows how well the model tolerates splices."""
    naive: Comparison
    """The same donor with unrotated keys: for comparison only."""
    elsewhere_kl_nats: float
    """KL(full || full at another position), mean over prompts: the effect of a position without a splice."""


class SelfTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result, as in the log and in `/server_info`."""

    verdict: Outcome
    reasons: tuple[str, ...] = ()
    """The limits exceeded and what to do, or why the test was skipped."""
    is_exact: bool = True
    """Whether splices that must equal a full prefill but for rounding do; otherwise the server does not start. The
    other limits, for rows from another context, are the operator's choice."""
    measured: Measured | None = None
    """`None` if nothing was measured."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the test ran and no limit was exceeded."""
        return self.verdict is Outcome.PASSED


class OperatorLimits(NamedTuple):
    """The configuration's limits for `reordered`."""

    kl_nats: float
    key_error: float


# Mean KL of moved prompts on the CPU platform, 2026-11, of a right splice and of wrong ones:
#              healthy: SmolLM2, tiny-gqa, tiny-mla     base a tenth off    mscale twice
#   bfloat16            1.6e-3   2.9e-3    1.0e-2       1.3   2.8   1.9     2.9e-2 ... 0.97
# The limits of keys are sharper, so these only have to catch errors that are not in the keys. A deep model differs more
# between positions without a splice; the limit is a multiple of that if it is larger, up to a ceiling.
MOVED_KL_LIMITS: Final[Mapping[torch.dtype, float]] = MappingProxyType(
    {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1, torch.float8_e4m3fn: 5e-1}
)
"""Nats allowed for a prompt spliced from itself at another position, by the dtype of its KV rows."""
_TIMES_ELSEWHERE: Final = 4.0
_MOVED_KL_CEILING: Final = 1.0

# Replaces NaN and infinity, which the JSON of `/server_info` does not have.
_BEYOND_MEASURE: Final = 1e9


class PromptPass(NamedTuple):
    """The result of one pass over a prompt."""

    logits: Tensor
    """`[vocab_size]` of the first token."""
    slots: Tensor
    """`[n]` int64: the slots of the spliced positions, in order."""


def measure_prompt(splicer: Splicer, full: PromptPass, spliced: PromptPass) -> Tensor:
    """Compare a spliced prompt with the same prompt computed in full; waits for the device.

    Returns:
        `[4]` float64 on the CPU: KL, whether the likeliest token differs, key error of the first layer and mean key
        error over layers; very large instead of NaN.
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
        measured: `[num_prompts, 4, 4]`: per prompt `measure_prompt` of moved, reordered, naive, and computed in full at
            another position, whose key errors are ignored.
        limits: for `reordered`; `None` if the prompts are not text: then only exactness is judged.
        dtype: the KV rows'.
        seconds: duration of the test.
    """
    moved, reordered, naive, elsewhere = (_summary(measured[:, number]) for number in range(4))
    rows, dtype_name = ROW_LIMITS[dtype], str(dtype).removeprefix("torch.")
    moved_kl = min(_MOVED_KL_CEILING, max(MOVED_KL_LIMITS[dtype], _TIMES_ELSEWHERE * elsewhere.kl_nats))
    not_exact = f"for {dtype_name} rows. Moved rows are wrong for this model: start without --radix-cache-backend pic"
    not_taken = "Answers on spliced prompts differ from computed ones: start without --radix-cache-backend pic, or set"
    # NOTE: keys of deeper layers differ between positions without a splice too, because rounding grows with depth.
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
    # The first check that fails is the reason; later ones follow from it or say less.
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
