"""The settings of a comparison that is never run, for tests of what surrounds it."""

from __future__ import annotations

from collections.abc import Sequence

from pic_bench.compare.run_folder import Config


def comparison_config(trace: str = "t", *, model: str = "m", arms: Sequence[str] = ("stock",)) -> Config:
    """A comparison of `trace` with every setting as it is where the command line names none."""
    return Config(
        trace=trace,
        model=model,
        arms=list(arms),
        server_args=[],
        pic_config=None,
        sessions=1,
        limit_sessions=None,
        limit_calls=None,
        max_tokens=16,
    )
