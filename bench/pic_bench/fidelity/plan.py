"""Reads the data of a fidelity run's configuration and composes all its prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pic_bench.fidelity.arms import DEFAULT_POLICIES, EXACT, Arm, parse_policy
from pic_bench.fidelity.cases.case import Job
from pic_bench.fidelity.cases.edits import edit_jobs
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.config import Config
from pic_bench.fidelity.passes import Passes, trace_calls
from pic_bench.fidelity.record import Donors, Experiment

DEFAULT_TRACE = "sample:opendevin"
CASES_POOL_TOKENS, PASSES_POOL_TOKENS = 60_000, 120_000
"""Of the KV pool: for one prompt after the other, and for a cache that lives on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run serves; once it is made, only a server is lacking."""

    config: Config
    text: ModelText
    jobs: list[Job]
    passes: list[Passes]
    pool_tokens: int


def make_plan(config: Config) -> Plan:
    """Read the data and put all prompts together.

    Raises:
        ConfigError: the model's folder or a size is of no use.
        TraceError: data cannot be read.
        BenchError: a prompt cannot be made of the data.
    """
    text, jobs = ModelText(Path(config.model)), list[Job]()
    if Experiment.EDITS in config.experiments:
        edited = [msgspec.structs.replace(arm, donors=Donors.EDITED) for arm in named_policies(config)]
        jobs = edit_jobs(config.edit_set, config.sizes.edits, text, config.seed, edited)
    passes = [*_passes(config, text)]
    pool_tokens = config.pool_tokens or (PASSES_POOL_TOKENS if passes else CASES_POOL_TOKENS)
    return Plan(config, text, jobs, passes, pool_tokens)


def named_policies(config: Config) -> list[Arm]:
    """The policies that were asked for; none where they are TRACE's default ones."""
    return [] if config.policies == DEFAULT_POLICIES else [parse_policy(name) for name in config.policies]


def _passes(config: Config, text: ModelText) -> Iterator[Passes]:
    """One trace after the other; each has a cache of its own."""
    if Experiment.TRACE not in config.experiments:
        return
    first, *others = map(parse_policy, config.policies)
    naive = msgspec.structs.replace(first, name="naive", rotate=False)
    for trace in config.data or [DEFAULT_TRACE]:
        source = Path(trace).name
        if calls := trace_calls(trace, source, text, config.model, config.sizes.calls):
            yield Passes(
                source=source,
                calls=calls,
                arms=(EXACT, *others, naive),
                finder=first,
                min_chunk_hit=config.min_chunk_hit,
            )
