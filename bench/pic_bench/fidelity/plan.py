"""What a fidelity run serves: reads the data of the configuration and puts all prompts together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import msgspec
from pic_traces.questions import (
    GENERATED,
    Question,
    generated_questions,
    is_question_set,
    read_questions,
)

from pic_bench.fidelity.arms import DEFAULT_POLICIES, Arm, parse_policy
from pic_bench.fidelity.cases.case import Case, Job
from pic_bench.fidelity.cases.compose import compose_jobs
from pic_bench.fidelity.cases.edits import edit_jobs
from pic_bench.fidelity.cases.passages import PassageJobs
from pic_bench.fidelity.cases.qa import qa_jobs
from pic_bench.fidelity.cases.text import ModelText, TextPool, trace_texts
from pic_bench.fidelity.cases.turns import conversation
from pic_bench.fidelity.config import Config
from pic_bench.fidelity.passes import TraceCall, distinct_tokens, trace_calls
from pic_bench.fidelity.record import Donors, Experiment

DEFAULT_TRACE = "sample:opendevin"
MAX_TEXT_QUESTIONS = 200
CASE_POOL_TOKENS = 60_000
MAX_POOL_TOKENS = 120_000
_ROOM = 32  # the answer behind a turn's prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run serves; once it is made, only a server is lacking."""

    config: Config
    text: ModelText
    passages: PassageJobs
    jobs: list[Job]
    calls: list[TraceCall]
    conversations: list[list[Case]]
    """Of TURNS: the prompts of each, turn by turn."""
    pool_tokens: int


def make_plan(config: Config, *, quiet: bool) -> Plan:
    """Read the data and put all prompts together.

    Raises:
        ConfigError: the model's folder or a size is of no use.
        TraceError: data cannot be read.
        BenchError: a prompt cannot be made of the data.
    """
    text = ModelText(Path(config.model))
    pool = TextPool(*_text_source(config), text)
    passages = PassageJobs(config.sizes, pool, text, config.seed)
    policies = [msgspec.structs.replace(arm, donors=Donors.EDITED) for arm in named_policies(config)]
    makers: dict[Experiment, Callable[[], Iterable[Job]]] = {
        Experiment.GRID: passages.grid,
        Experiment.SHIFT: passages.shift,
        Experiment.QA: lambda: qa_jobs(config.sizes, chosen_questions(config), text, config.seed),
        Experiment.COMPOSE: lambda: compose_jobs(config.sizes, text, pool, config.seed),
        Experiment.EDITS: lambda: edit_jobs(config.edit_set, config.sizes.edits, text, config.seed, policies),
    }
    jobs = [job for experiment, make in makers.items() if experiment in config.experiments for job in make()]
    conversations: list[list[Case]] = []
    if Experiment.TURNS in config.experiments:
        conversations = [conversation(change, config.sizes.turns, text, config.seed) for change in config.changes]
    calls: list[TraceCall] = []
    if Experiment.TRACE in config.experiments:
        # One trace after the other; each has namespaces of its own.
        for trace in [name for name in config.data if not is_question_set(Path(name))] or [DEFAULT_TRACE]:
            calls += trace_calls(trace, Path(trace).name, text, config.model, config.sizes.calls)
    pool_tokens = config.pool_tokens or _pool_tokens(calls, conversations, quiet=quiet)
    return Plan(config, text, passages, jobs, calls, conversations, pool_tokens)


def named_policies(config: Config) -> list[Arm]:
    """The policies that were asked for; none where they are TRACE's default ones."""
    return [] if config.policies == DEFAULT_POLICIES else [parse_policy(name) for name in config.policies]


def chosen_questions(config: Config) -> list[Question]:
    """Questions of all question files, as many from each, in turn; generated questions where there is no such file."""
    limit, seed = config.sizes.questions, config.seed
    files = [path for name in config.data if is_question_set(path := Path(name))]
    if files:
        sources = [read_questions(path, limit=limit, seed=seed) for path in files]
    else:
        sources = [list(generated_questions(kind, limit=limit, seed=seed)) for kind in GENERATED]
    return [question for in_turn in zip_longest(*sources) for question in in_turn if question is not None]


def _text_source(config: Config) -> tuple[str, list[str]]:
    """Name and texts of the file that GRID and SHIFT take their text from: the first."""
    name = config.data[0] if config.data else DEFAULT_TRACE
    path = Path(name)
    if not is_question_set(path):
        return path.name, trace_texts(name)
    questions = read_questions(path, limit=MAX_TEXT_QUESTIONS, seed=config.seed)
    return path.name, list(dict.fromkeys(document for question in questions for document in question.documents))


def _pool_tokens(calls: list[TraceCall], conversations: list[list[Case]], *, quiet: bool) -> int:
    """Tokens of the KV pool: for the cases, and so many that no trace or conversation loses a row, up to a limit."""
    wanted = 0
    if calls:
        wanted = distinct_tokens(calls) + 2 * max(len(call.prompt) + len(call.answer) for call in calls)
    # Behind a field that changes nothing is shared.
    wanted = max([wanted, *(sum(len(turn.prompt) + _ROOM for turn in turns) for turns in conversations)])
    if wanted > MAX_POOL_TOKENS and not quiet:
        print(
            f"A cache that loses nothing needs a pool of {wanted} tokens; {MAX_POOL_TOKENS} are taken, and the "
            "least recently used rows are evicted. --max-total-tokens sets another pool.",
            file=sys.stderr,
        )
    return max(CASE_POOL_TOKENS, min(wanted, MAX_POOL_TOKENS))
