"""What a fidelity run serves: reads the data of the configuration and puts all prompts together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import msgspec
from pic_generate.questions import GENERATED, Question, generated_questions, is_question_set, read_questions

from pic_bench.fidelity.arms import DEFAULT_POLICIES, EXACT, Arm, parse_policy
from pic_bench.fidelity.cases.case import Job
from pic_bench.fidelity.cases.edits import edit_jobs
from pic_bench.fidelity.cases.qa import qa_jobs
from pic_bench.fidelity.cases.tasks import task_jobs
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.config import Config
from pic_bench.fidelity.passes import Passes, trace_calls
from pic_bench.fidelity.record import Donors, Experiment

T = TypeVar("T")

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
    sizes, seed, text = config.sizes, config.seed, ModelText(Path(config.model))
    policies = named_policies(config)
    edited = [msgspec.structs.replace(arm, donors=Donors.EDITED) for arm in policies]
    makers: dict[Experiment, Callable[[], Iterable[Job]]] = {
        Experiment.QA: lambda: qa_jobs(in_turn(chosen_questions(config, sizes.questions)), text, seed),
        Experiment.EDITS: lambda: edit_jobs(config.edit_set, sizes.edits, text, seed, edited),
        Experiment.TASKS: lambda: in_turn(
            task_jobs(chosen_questions(config, sizes.tasks), _traces(config), text, config.model, sizes, policies, seed)
        ),
    }
    jobs = [job for experiment, make in makers.items() if experiment in config.experiments for job in make()]
    passes = [*_passes(config, text)]
    pool_tokens = config.pool_tokens or (PASSES_POOL_TOKENS if passes else CASES_POOL_TOKENS)
    return Plan(config, text, jobs, passes, pool_tokens)


def named_policies(config: Config) -> list[Arm]:
    """The policies that were asked for; none where they are TRACE's default ones."""
    return [] if config.policies == DEFAULT_POLICIES else [parse_policy(name) for name in config.policies]


def chosen_questions(config: Config, limit: int) -> list[list[Question]]:
    """So many questions of each question file; of each kind of generated ones where there is no such file."""
    seed = config.seed
    if files := [path for name in config.data if is_question_set(path := Path(name))]:
        return [read_questions(path, limit=limit, seed=seed) for path in files]
    return [list(generated_questions(kind, limit=limit, seed=seed)) for kind in GENERATED]


def in_turn(sources: Iterable[Iterable[T]]) -> list[T]:
    """One of each source after the other, those of the longest alone at the end."""
    return [one for turn in zip_longest(*sources) for one in turn if one is not None]


def _traces(config: Config) -> list[str]:
    return [name for name in config.data if not is_question_set(Path(name))]


def _passes(config: Config, text: ModelText) -> Iterator[Passes]:
    """One trace after the other; each has a cache of its own."""
    if Experiment.TRACE not in config.experiments:
        return
    first, *others = map(parse_policy, config.policies)
    naive = msgspec.structs.replace(first, name="naive", rotate=False)
    for trace in _traces(config) or [DEFAULT_TRACE]:
        source = Path(trace).name
        if calls := trace_calls(trace, source, text, config.model, config.sizes.calls):
            yield Passes(
                source=source,
                calls=calls,
                arms=(EXACT, *others, naive),
                finder=first,
                min_chunk_hit=config.min_chunk_hit,
            )
