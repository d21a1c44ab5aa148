"""The experiment TRACE: recorded calls in order, each policy with a cache of its own that fills up as in life.

Owns the order of a call's requests and which calls are measured. Every policy, and the exact prefix cache that stock
SGLang would have, lives in a namespace of its own for the whole trace. A recorded answer is computed behind its prompt,
so that later calls find it cached as if it had been generated. It must not know folders or reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
from pic_traces.encode import load_encoder
from pic_traces.source import limit, load

from pic_bench.fidelity.arms import EXACT, FULL, RETEST, Arm
from pic_bench.fidelity.case import Case
from pic_bench.fidelity.measure import Reference, add_greedy, compare
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.target import Recorded, Target
from pic_bench.fidelity.tokens import ModelText
from sglang_pic.errors import BenchError

__all__ = ["TraceCall", "distinct_tokens", "measure_calls", "trace_calls"]

GOLD_TOKENS = 32
MAX_ANSWER_TOKENS = 512
_ROOM = 72  # what is generated behind a prompt


@dataclass(frozen=True, slots=True)
class TraceCall:
    """One call as token ids."""

    source: str
    name: str
    prompt: list[int]
    answer: list[int]
    """The recorded answer, at least one token of it."""

    @property
    def case(self) -> Case:
        """The call as every experiment's prompts are described; its blocks are whatever the cache finds."""
        return Case(
            experiment=Experiment.TRACE,
            name=self.name,
            source=self.source,
            prompt=self.prompt,
            gold=self.answer[:GOLD_TOKENS],
            blocks=(),
            donors={},
        )


def trace_calls(trace: str, source: str, text: ModelText, model: str, num_calls: int | None) -> list[TraceCall]:
    """The calls of a trace that have an answer and fit into the model's context.

    Raises:
        TraceError: the trace cannot be read, or the model's template refuses a call.
    """
    encoder = load_encoder(model)
    calls = []
    for number, session in enumerate(limit(load(trace), num_calls=num_calls)):
        for call in session.calls():
            encoded = encoder.encode(call)
            prompt_len = len(encoded.tokens)
            answer = encoded.path[prompt_len:][:MAX_ANSWER_TOKENS].tolist()
            if answer and prompt_len + max(len(answer), _ROOM) < text.context_len:
                calls.append(TraceCall(source, f"{number:03d}-{call.index:03d}", encoded.tokens.tolist(), answer))
    return calls


def distinct_tokens(calls: Sequence[TraceCall]) -> int:
    """How many rows a cache that loses nothing holds after all calls. O(calls squared), in vectors."""
    total = 0
    paths: list[np.ndarray] = []
    for call in calls:
        path = np.array([*call.prompt, *call.answer], dtype=np.int32)
        total += len(path) - max((_common_len(path, other) for other in paths), default=0)
        paths.append(path)
    return total


def measure_calls(
    calls: Sequence[TraceCall],
    policies: Sequence[Arm],
    target: Target,
    text: ModelText,
    *,
    dtype: str,
    min_chunk_hit: int,
    greedy_calls: int,
    greedy_tokens: int,
    done: AbstractSet[str],
) -> Iterator[list[Probe]]:
    """Serve the calls in order; the records of each, none where the first policy finds too little to splice.

    What is generated extends the rows of its namespace by less than any run.

    Args:
        greedy_calls: so many of the measured calls are generated from, under all arms.
        done: names of calls that are measured already: they are served, to fill the caches, and not compared.
    """
    num_measured = 0
    for number, call in enumerate(calls):
        exact = _serve(call, EXACT, target, _cache_key(call, EXACT))
        spliced = [(arm, _serve(call, arm, target, _cache_key(call, arm))) for arm in policies]
        if spliced[0][1].chunk_hit_tokens < min_chunk_hit:
            yield []
            continue
        num_measured += 1
        if call.name in done:
            yield []
            continue
        own_keys = {arm.name: f"trace-{number}-{arm.name}-{call.source}" for arm in (FULL, RETEST)}
        full, retest = (_serve(call, arm, target, own_keys[arm.name]) for arm in (FULL, RETEST))
        if full.prefix_hit_tokens or full.chunk_hit_tokens or exact.chunk_hit_tokens:
            raise BenchError(f"{call.name}: a control was served from the cache: {full.prefix_hit_tokens} tokens.")
        served = [(FULL, full), (RETEST, retest), (EXACT, exact), *spliced]
        reference = Reference(full)
        case = call.case
        probes = [compare(reference, recorded, arm, case, dtype, text) for arm, recorded in served]
        if num_measured <= greedy_calls:
            arms = [arm for arm, _ in served]
            keys = [own_keys.get(arm.name) or _cache_key(call, arm) for arm in arms]
            generated = target.greedy([call.prompt] * len(arms), arms, keys, greedy_tokens)
            probes = [
                add_greedy(probe, case, generated[0], ids, None, text)
                for probe, ids in zip(probes, generated, strict=True)
            ]
        yield probes


def _serve(call: TraceCall, arm: Arm, target: Target, key: str) -> Recorded:
    """Serve a call; of a long answer only the positions that are compared are kept."""
    recorded = target.record(call.prompt, call.answer, arm, key=key, donors_from=key, keys=False)
    return replace(recorded, logits=recorded.logits[: GOLD_TOKENS + 1])


def _cache_key(call: TraceCall, arm: Arm) -> str:
    assert arm == EXACT or arm.donors is Donors.TRACE
    return f"trace-{call.source}/{arm.name}"


def _common_len(a: np.ndarray, b: np.ndarray) -> int:
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    return int(differs.argmax()) if differs.any() else shortest
