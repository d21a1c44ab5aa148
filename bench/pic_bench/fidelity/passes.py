"""The experiments TRACE and TURNS: calls in order, under each policy with a cache that fills up as in life.

A pass serves every call under one arm, after a flush, so that the arm has the pool to itself, and later calls build on
what earlier ones left. So the full prefills are computed once and their logits kept in files, the *vault*. A pass that
was broken off is served again from its first call.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from pic_traces.encode import load_encoder
from pic_traces.source import limit, load

from pic_bench.fidelity.arms import EDIT_ARMS, EXACT, FULL, RECORDED, RETEST, Arm, parse_policy, place_sessions
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.config import Config
from pic_bench.fidelity.measure import Reference, add_greedy, compare
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.target import Recorded, Target
from pic_bench.out_folder import write_whole
from sglang_pic.core import common_len
from sglang_pic.errors import BenchError

GOLD_TOKENS = 32
MAX_ANSWER_TOKENS = 512
RETEST_CALLS = 24  # of each order: what computing again changes is soon told, and it costs a full prefill
TURNS_POLICIES = tuple(msgspec.structs.replace(arm, donors=Donors.TRACE) for arm in EDIT_ARMS)
"""Where the command line names none."""
_ROOM = 72  # what is generated behind a prompt
_CACHE = "pass"
"""The namespace of a pass: each begins with a flush, so one serves them all."""


class Step(NamedTuple):
    """One call served under one arm."""

    label: str
    prompt_tokens: int
    probes: list[Probe]


@dataclass(frozen=True, slots=True)
class TraceCall:
    """One call as token ids."""

    source: str
    session: int
    index: int
    prompt: list[int]
    answer: list[int]
    """The recorded answer, at least one token of it."""

    @property
    def name(self) -> str:
        """Unique in its trace."""
        return f"{self.session:03d}-{self.index:03d}"

    @property
    def gold(self) -> list[int]:
        """The part of the answer that is compared."""
        return self.answer[:GOLD_TOKENS]

    def case(self, order: str) -> Case:
        """The call as every experiment's prompts are described; its blocks are whatever the cache finds."""
        name = self.name if order == RECORDED else f"{order}/{self.name}"
        return Case(experiment=Experiment.TRACE, name=name, source=self.source, prompt=self.prompt, gold=self.gold)


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
                calls.append(TraceCall(source, number, call.index, encoded.tokens.tolist(), answer))
    return calls


def distinct_tokens(calls: Sequence[TraceCall]) -> int:
    """How many rows a cache that loses nothing holds after all calls. O(calls squared), in vectors."""
    total = 0
    paths: list[np.ndarray] = []
    for call in calls:
        path = np.array([*call.prompt, *call.answer], dtype=np.int32)
        total += len(path) - max((common_len(path, other) for other in paths), default=0)
        paths.append(path)
    return total


class Vault:
    """A folder for what passes leave for one another: requests, and which calls are measured.

    Every file appears at once, so that an interrupted run can be continued from the files. About 6 MB a call for a
    vocabulary of 49,152 and 32 gold tokens.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, recorded: Recorded) -> None:
        """Keep a request, less its keys; one of the same name is replaced."""
        file = io.BytesIO()
        np.savez(file, **{one.name: getattr(recorded, one.name) for one in fields(recorded) if one.name != "keys"})
        write_whole(self._folder / f"{name}.npz", file.getvalue())

    def find(self, name: str) -> Recorded | None:
        """What is kept under a name."""
        path = self._folder / f"{name}.npz"
        if not path.exists():
            return None
        with np.load(path) as arrays:
            others = {field: arrays[field].tolist() for field in arrays.files if field != "logits"}
            return Recorded(logits=arrays["logits"], keys=None, **others)

    def get(self, name: str) -> Recorded:
        """What an earlier step of the same run has kept under a name."""
        found = self.find(name)
        assert found is not None, f"{name} is kept before it is asked for"
        return found

    def put_measured(self, order: str, names: list[str]) -> None:
        """Note the calls that are measured."""
        write_whole(self._folder / f"measured-{order}.json", msgspec.json.encode(names))

    def measured(self, order: str) -> list[str] | None:
        """Names of the measured calls, as they were served; None where they are not known yet."""
        path = self._folder / f"measured-{order}.json"
        return msgspec.json.decode(path.read_bytes(), type=list[str]) if path.exists() else None


@dataclass(slots=True, kw_only=True)
class Passes:
    """What passes over a trace and over a conversation have in common, on one server.

    Args:
        source: the trace's name, or how the field of the conversation changes.
        done: `(prompt, arm)` of the records that an earlier run left.
    """

    source: str
    target: Target
    text: ModelText
    vault: Vault
    dtype: str
    done: AbstractSet[tuple[str, str]]

    def _alone(self, name: str, prompt: list[int], gold: list[int], arm: Arm = FULL) -> Recorded:
        """A full prefill, in a namespace of its own."""
        key = f"{arm.name}/{name}"
        recorded = self.target.record(prompt, gold, arm, key=key, donors_from=key, keys=False)
        if recorded.prefix_hit_tokens or recorded.chunk_hit_tokens:
            raise BenchError(f"{name}: a full prefill was served {recorded.prefix_hit_tokens} cached tokens.")
        return recorded


@dataclass(slots=True, kw_only=True)
class TurnsRun(Passes):
    """One conversation under all policies.

    Args:
        arms: of which a record is missing.
    """

    turns: Sequence[Case]
    arms: Sequence[Arm]

    @property
    def cost(self) -> int:
        """Prompt tokens of all passes."""
        return (1 + len(self.arms)) * sum(len(case.prompt) for case in self.turns)

    def steps(self) -> Iterator[Step]:
        """Serve everything that is missing; a step for every turn of every pass.

        Raises:
            BenchError: a full prefill was served from the cache.
        """
        for case in self.turns:
            if (full := self.vault.find(case.name)) is None:
                full = self._alone(case.name, case.prompt, case.gold)
                self.vault.put(case.name, full)
            yield self._step(full, FULL, case)
        for arm in self.arms:
            self.target.flush()
            for case in self.turns:
                recorded = self.target.record(case.prompt, case.gold, arm, key=_CACHE, donors_from=None, keys=False)
                yield self._step(recorded, arm, case)

    def _step(self, recorded: Recorded, arm: Arm, case: Case) -> Step:
        probes: list[Probe] = []
        if (case.name, arm.name) not in self.done:
            full = Reference(recorded if arm == FULL else self.vault.get(case.name))
            probes.append(compare(full, recorded, arm, case, self.dtype, self.text))
        return Step(arm.name, len(case.prompt), probes)


@dataclass(slots=True, kw_only=True)
class TraceRun(Passes):
    """One trace under all arms.

    The first policy says which calls are measured: those for which it splices enough. A recorded answer is computed
    behind its prompt, so that later calls find it cached.

    Args:
        calls: of one trace, in recorded order.
    """

    config: Config
    calls: Sequence[TraceCall]
    _generating: set[str] = field(default_factory=set)
    """The calls of the current order that are generated from, under all arms."""

    @property
    def cost(self) -> int:
        """Prompt tokens of all passes: each policy's, the naive one's and the exact prefix cache's, in every order."""
        num_passes = len(self.config.orders) * (2 + len(self.config.policies))
        return num_passes * sum(len(call.prompt) for call in self.calls)

    def steps(self) -> Iterator[Step]:
        """Serve everything; a step for every call of every pass, and for every full prefill.

        Raises:
            BenchError: a control was served from the cache.
        """
        first, *others = map(parse_policy, self.config.policies)
        naive = msgspec.structs.replace(first, name="naive", rotate=False)
        # What says most comes first, for a run that is broken off.
        for order in self.config.orders:
            yield from self._find(order, first)
            yield from self._controls(order, first)
        for arm in (EXACT, *others, naive):
            for order in self.config.orders:
                yield from self._pass(order, arm)

    def _begin(self, order: str) -> Sequence[str]:
        """Generate from this order's first measured calls from now on; returns the names of all its measured calls."""
        measured = self.vault.measured(order) or []
        self._generating = set(measured[: self.config.sizes.greedy_prompts])
        return measured

    def _sequence(self, order: str) -> list[TraceCall]:
        place = place_sessions((call.session for call in self.calls), order)
        return sorted(self.calls, key=lambda call: (place[call.session], call.index))

    def _find(self, order: str, first: Arm) -> Iterator[Step]:
        """The pass of the first policy: finds the calls to measure, and keeps their records."""
        if self.vault.measured(order) is not None:
            return
        measured: list[str] = []
        self.target.flush()
        for call in self._sequence(order):
            recorded = self._record(call, first)
            if recorded.chunk_hit_tokens >= self.config.min_chunk_hit:
                measured.append(call.name)
                self._generating = set(measured[: self.config.sizes.greedy_prompts])
                recorded = self._generated(recorded, call, first, _CACHE)
                self.vault.put(f"first-{order}-{call.name}", recorded)
            yield Step(first.name, len(call.prompt), [])
        self.vault.put_measured(order, measured)

    def _controls(self, order: str, first: Arm) -> Iterator[Step]:
        """Full prefill, full prefill again, and the first policy's records."""
        measured = self._begin(order)
        by_name = {call.name: call for call in self.calls}
        for number, call in enumerate(by_name[name] for name in measured):
            case = call.case(order)
            controls = (FULL, RETEST, first) if number < RETEST_CALLS else (FULL, first)
            # The passes need it from the vault, which an earlier run need not have left.
            full = Reference(self._full(call))
            probes = []
            for arm in (arm for arm in controls if (case.name, arm.name) not in self.done):
                if arm == RETEST:
                    recorded = self._control(call, RETEST)
                else:
                    recorded = full.recorded if arm == FULL else self.vault.get(f"first-{order}-{call.name}")
                probes.append(self._probe(full, recorded, arm, case))
            yield Step(FULL.name, 0, probes)

    def _pass(self, order: str, arm: Arm) -> Iterator[Step]:
        """Every call in order; the measured ones are compared."""
        measured = frozenset(self._begin(order))
        sequence = self._sequence(order)
        wanted = {call.name for call in sequence if (call.case(order).name, arm.name) not in self.done} & measured
        if wanted:
            self.target.flush()
        for call in sequence:
            probes = []
            if call.name in wanted:
                recorded = self._record(call, arm)
                if arm.is_control and recorded.chunk_hit_tokens:
                    raise BenchError(f"{call.name}: a control was spliced: {recorded.chunk_hit_tokens} tokens.")
                recorded = self._generated(recorded, call, arm, _CACHE)
                full = Reference(self.vault.get(f"full-{call.name}"))
                probes.append(self._probe(full, recorded, arm, call.case(order)))
            elif wanted:
                self._serve(call, arm)
            yield Step(arm.name, len(call.prompt), probes)

    def _full(self, call: TraceCall) -> Recorded:
        """The full prefill, computed once for all orders."""
        name = f"full-{call.name}"
        kept = self.vault.find(name)
        if kept is None or (call.name in self._generating and not kept.ids):
            kept = self._control(call, FULL)
            self.vault.put(name, kept)
        return kept

    def _control(self, call: TraceCall, arm: Arm) -> Recorded:
        recorded = self._alone(call.name, call.prompt, call.gold, arm)
        return self._generated(recorded, call, arm, f"{arm.name}/{call.name}")

    def _probe(self, full: Reference, recorded: Recorded, arm: Arm, case: Case) -> Probe:
        probe = compare(full, recorded, arm, case, self.dtype, self.text)
        if not full.recorded.ids or not recorded.ids:
            return probe
        return add_greedy(probe, case, full.recorded.ids, recorded.ids, self.text)

    def _record(self, call: TraceCall, arm: Arm) -> Recorded:
        """Serve a call on the arm's own cache, its answer behind it."""
        recorded = self.target.record(call.prompt, call.gold, arm, key=_CACHE, donors_from=_CACHE, keys=False)
        self._serve_answer(call, arm)
        return recorded

    def _serve(self, call: TraceCall, arm: Arm) -> None:
        """Leave in the cache what `_record` leaves, with nothing recorded."""
        ids = [*call.prompt, *call.gold]
        self.target.serve(ids, arm, key=_CACHE, donors_from=_CACHE, compute_from=len(call.prompt) - 1)
        self._serve_answer(call, arm)

    def _serve_answer(self, call: TraceCall, arm: Arm) -> None:
        if len(call.answer) > len(call.gold):
            self.target.serve([*call.prompt, *call.answer], arm, key=_CACHE, donors_from=_CACHE)

    def _generated(self, recorded: Recorded, call: TraceCall, arm: Arm, key: str) -> Recorded:
        """The request with what is generated after it, where that is measured: less than any run behind its rows."""
        if call.name not in self._generating:
            return recorded
        (ids,) = self.target.greedy([call.prompt], [arm], [key], self.config.sizes.greedy_tokens)
        return replace(recorded, ids=ids)
