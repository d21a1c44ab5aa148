"""The metrics of start-up: of the self-test, and of the certificate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.runtime.checks.spliced_prompts import SelfTest

_PASSED: Final = Metric(
    "sglang:pic_self_test_passed", MetricKind.GAUGE, "1 if the start-up self-test was within all limits, else 0."
)
_KL: Final = Metric(
    "sglang:pic_self_test_kl_nats",
    MetricKind.GAUGE,
    "KL(full || spliced) of the first token in the start-up self-test, mean over the built-in prompts, in nats.",
)
_KEY_ERROR: Final = Metric(
    "sglang:pic_self_test_key_error_ratio",
    MetricKind.GAUGE,
    "Relative L2 of spliced keys in the start-up self-test, the largest over the built-in prompts.",
)
_FITS: Final = Metric(
    "sglang:pic_certificate_fits",
    MetricKind.GAUGE,
    "1 if the configured certificate fits this model, its rows and these settings, else 0; absent without one.",
)
METRICS: Final = (_PASSED, _KL, _KEY_ERROR, _FITS)


def export(result: SelfTest, labels: Mapping[str, str] | None) -> None:
    """Export the measures of the self-test, if there are any; `labels` as for `Series`."""
    if result.measured is not None:
        series, reordered = Series((_PASSED, _KL, _KEY_ERROR), labels), result.measured.reordered
        series.set(_PASSED, result.passed)
        series.set(_KL, reordered.kl_nats)
        series.set(_KEY_ERROR, reordered.key_error)


def export_certificate(fits: bool, labels: Mapping[str, str] | None) -> None:
    """Export whether the certificate fits; `labels` as for `Series`."""
    Series((_FITS,), labels).set(_FITS, fits)
