"""Whether a share falls over time: its slope, and its second half against its first, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

_RESAMPLES = 2000
_HOUR_S = 3600.0


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value with the bounds of its 95 % percentile-bootstrap interval over windows."""

    value: float
    low: float
    high: float


class Trend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a share went over the windows behind the warm-up."""

    first_half: float
    """Share of the first half of the windows, all their tokens together."""
    second_half: float
    change: Interval
    """Second half less first half."""
    slope_per_hour: Interval
    """Slope of a straight line through the windows' shares, each weighed by its tokens."""

    @property
    def decays(self) -> bool:
        """Whether the share falls by more than its windows differ by chance."""
        return self.slope_per_hour.high < 0 or self.change.high < 0


def fit_trend(parts: Sequence[int], wholes: Sequence[int], window_s: float, *, seed: int = 1) -> Trend | None:
    """The trend of `parts / wholes`, a pair a window; None where fewer than four windows have tokens.

    Args:
        parts: tokens that count, by window in order of time.
        wholes: of how many; windows without any are left out.
        window_s: length of a window.
        seed: of the resampling.
    """
    kept = np.flatnonzero(np.asarray(wholes) > 0)
    if len(kept) < 4:
        return None
    part, whole = (np.asarray(each, dtype=np.float64)[kept] for each in (parts, wholes))
    hours = (kept.astype(np.float64) + 0.5) * window_s / _HOUR_S
    half = len(kept) // 2
    rng = np.random.default_rng(seed)
    any_of, early, late = (
        low + rng.integers(0, size, (_RESAMPLES, size))
        for low, size in ((0, len(kept)), (0, half), (half, len(kept) - half))
    )
    # Resamples of one window only have no slope.
    any_of = any_of[(any_of != any_of[:, :1]).any(axis=1)]
    changes = _share(part, whole, late) - _share(part, whole, early)
    everything = np.arange(len(kept))
    first, second = (float(_share(part, whole, rows)[0]) for rows in (everything[None, :half], everything[None, half:]))
    slope = float(_slopes(hours, part, whole, everything[None])[0])
    return Trend(
        first_half=first,
        second_half=second,
        change=_interval(second - first, changes),
        slope_per_hour=_interval(slope, _slopes(hours, part, whole, any_of)),
    )


_Array = npt.NDArray[np.float64]


def _share(part: _Array, whole: _Array, rows: npt.NDArray[np.int64]) -> _Array:
    """The share of each resample, `[num_resamples]`."""
    shares: _Array = part[rows].sum(axis=1) / whole[rows].sum(axis=1)
    return shares


def _slopes(hours: _Array, part: _Array, whole: _Array, rows: npt.NDArray[np.int64]) -> _Array:
    """The weighted slope of each resample, `[num_resamples]`."""
    x, y, weight = hours[rows], (part / whole)[rows], whole[rows]
    total = weight.sum(axis=1, keepdims=True)
    dx = x - (weight * x).sum(axis=1, keepdims=True) / total
    dy = y - (weight * y).sum(axis=1, keepdims=True) / total
    slopes: _Array = (weight * dx * dy).sum(axis=1) / (weight * dx * dx).sum(axis=1)
    return slopes


def _interval(value: float, resampled: _Array) -> Interval:
    low, high = (float(bound) for bound in np.percentile(resampled, [2.5, 97.5]))
    return Interval(value=value, low=low, high=high)
