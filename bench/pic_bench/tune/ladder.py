"""The ladder: settings from careful to most reuse, one path along which each splices what the one before it splices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pic_traces.encode import load_encoder

from pic_bench.fidelity.arms import Arm, parse_policy
from sglang_pic.census.inputs import with_progress
from sglang_pic.census.simulate import CacheScope
from sglang_pic.census.survey import Survey
from sglang_pic.core import CoreConfig

LADDER: Final = (
    "careful=preset:careful",
    "seam-32=seam:32",
    "balanced=preset:balanced",
    "any-order=preset:balanced,reordered:splice",
    "no-tail=preset:balanced,reordered:splice,tail:0",
    "most=preset:most",
)
"""As `--policy` of `fidelity` takes them; what is left out is as in `careful`, the server's defaults."""
LEAST_GAIN: Final = 0.005
"""Of the prefix cache's misses: a rung that the census gives less than this beyond the one before is not measured."""


def rungs() -> list[Arm]:
    """The ladder, from careful to most reuse."""
    return [parse_policy(spec) for spec in LADDER]


def settings(rung: Arm) -> CoreConfig:
    """A rung as the settings of a server."""
    return CoreConfig(**rung.overrides)  # type: ignore[arg-type]


def survey(logs: Sequence[str], model: str, *, quiet: bool) -> dict[str, float]:
    """Every rung's share of the prefix cache's misses, by the census of all logs; needs no server.

    Raises:
        TraceError: a log cannot be read.
    """
    found, encoder = {}, load_encoder(model)
    for rung in rungs():
        census = Survey(logs, encoder, settings(rung), CacheScope.ALL)
        num_calls = census.prepare()
        if not quiet:
            print(f"census, {rung.name}: {num_calls:,} calls ...", file=sys.stderr, flush=True)
        for _ in with_progress(census.run(), num_calls, quiet=quiet):
            pass
        found[rung.name] = census.result().total.recovered or 0.0
    return found


def worth_climbing(reuse: Mapping[str, float]) -> Iterator[Arm]:
    """The rungs that reuse more than the one before, the most careful one always."""
    last: float | None = None
    for rung in rungs():
        if last is None or reuse[rung.name] >= last + LEAST_GAIN:
            last = reuse[rung.name]
            yield rung
