"""How the figures of a fidelity report are written: short enough for a table cell, with their intervals.

It must not know what a figure means.
"""

from __future__ import annotations

from collections.abc import Callable

from pic_bench.report.stats import Estimate

__all__ = ["divergence", "number", "points", "score", "share", "signed", "tick", "with_interval"]


def divergence(value: float) -> str:
    """A KL in nats to two digits: 0, 3.1e-7, .0031, .31, 1.24."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    # Rounded before the form is chosen: .99996 is written as 1.00.
    rounded = float(f"{value:.2g}")
    return f"{value:.2f}" if abs(rounded) >= 1 else f"{rounded:#.2g}".replace("0.", ".", 1)


def tick(value: float) -> str:
    """A round value on a logarithmic axis of divergences: 3e-4, .003, .1, 2."""
    return f"{value:.0e}".replace("e-0", "e-") if value < 9e-4 else f"{value:g}".replace("0.", ".", 1)


def number(value: float) -> str:
    """A value near one, such as a cosine, with four digits."""
    return f"{value:.4f}"


def score(value: float) -> str:
    """A score in [0, 1], or a difference of two, with three digits."""
    return f"{value:.3f}"


def share(value: float) -> str:
    """A share in percent, with one digit unless it is all or nothing."""
    return f"{value * 100:.0f} %" if value in (0, 1) else f"{value * 100:.1f} %"


def points(value: float) -> str:
    """A difference of two shares, in points of a hundred."""
    return f"{value * 100:+.1f}"


def signed(write: Callable[[float], str]) -> Callable[[float], str]:
    """The same with a sign, for differences."""
    return lambda value: ("+" if value > 0 else "") + write(value)


def with_interval(estimate: Estimate | None, write: Callable[[float], str]) -> str:
    """`.0031 [.0024, .0040]`, or `-` of nothing."""
    if estimate is None:
        return "-"
    low, high = (write(bound).removesuffix(" %") for bound in (estimate.low, estimate.high))
    return f"{write(estimate.value)} [{low}, {high}]"
