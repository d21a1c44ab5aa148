"""Passes over a trace: its calls in order, under each policy with a cache that fills up as in life.

A pass serves every call under one arm, after a flush, so that the arm has the pool to itself, and later calls build on
what earlier ones left. So the full prefills are computed once and their logits kept in files, the *vault*. A pass that
was broken off is served again from its first call.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pic_traces.encode import Encoder, load_encoder
from pic_traces.session import Session
from pic_traces.source import limit, load

from pic_bench.fidelity.arms import FULL, RETEST, Arm
from pic_bench.fidelity.cases.case import Case, Ids
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.measure import Reference, Step, compare
from pic_bench.fidelity.record import Probe
from pic_bench.fidelity.target import Recorded, Target
from sglang_pic.errors import BenchError
from sglang_pic.output import write_whole

GOLD_TOKENS = 32
MAX_ANSWER_TOKENS = 512
_ROOM = 72  # what is generated behind a prompt
RETEST_CALLS = 4  # a full prefill each, which soon shows what computing again changes
_CACHE = "pass"  # the namespace of a pass: each begins with a flush, so one serves them all


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a session; its blocks are whatever the cache finds."""

    session: int
    case: Case
    answer: Ids
    """All of it; gold is its beginning."""


def trace_calls(trace: str, source: str, text: ModelText, model: str, num_calls: int | None) -> list[Call]:
    """The calls of a trace that have an answer and fit into the model's context.

    Raises:
        TraceError: the trace cannot be read, or the model's template refuses a call.
    """
    encoder = load_encoder(model)
    sessions = enumerate(limit(load(trace), num_calls=num_calls))
    found = (call for at, session in sessions for call in session_calls(session, at, source, encoder, text))
    return [call for call in found if call.answer]


def session_calls(session: Session, number: int, source: str, encoder: Encoder, text: ModelText) -> Iterator[Call]:
    """The calls of one session, under a number of its own, that fit into the model's context, also without an answer.

    Raises:
        TraceError: the model's template refuses a call.
    """
    for call in session.calls():
        encoded = encoder.encode(call)
        prompt = encoded.tokens.tolist()
        answer = encoded.path[len(prompt) :][:MAX_ANSWER_TOKENS].tolist()
        if len(prompt) + max(len(answer), _ROOM) < text.context_len:
            case = Case(
                name=call_name(number, call.index),
                source=source,
                prompt=prompt,
                gold=answer[:GOLD_TOKENS],
            )
            yield Call(number, case, answer)


def call_name(session: int, call: int) -> str:
    """The name of a session's call, both by their numbers."""
    return f"{session:03d}-{call:03d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The calls that are served in passes, and their arms."""

    source: str
    calls: Sequence[Call]
    """In recorded order, those of a session one after the other."""
    arms: Sequence[Arm]
    """Each has a pass of its own; the most telling one first, for a run that is broken off."""
    finder: Arm | None = None
    """Served before all others: the policy that says which calls are measured. None measures all."""
    min_chunk_hit: int = 0
    """A call is measured where the finder splices so many of its tokens."""
    measured: AbstractSet[str] | None = None
    """Without a finder, the names of the calls that are measured; None measures all."""
    controls: Sequence[Arm] = ()
    """Served after each full prefill, behind an exact hit on half of the prompt."""

    @property
    def cost(self) -> int:
        """Prompt tokens of all passes; the full prefills of all calls are one, as is the pass of a finder."""
        return (1 + len(self.arms)) * sum(len(call.case.prompt) for call in self.calls)


class Vault:
    """A folder for the requests that passes leave for one another.

    Every file appears at once, so that an interrupted run can be continued from the files. About 6 MB a call for a
    vocabulary of 49,152 and 32 gold tokens.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, recorded: Recorded) -> None:
        """Keep a request's logits and hits."""
        file = io.BytesIO()
        np.savez(file, logits=recorded.logits, hits=[recorded.prefix_hit_tokens, recorded.chunk_hit_tokens])
        write_whole(self._folder / f"{name}.npz", file.getvalue())

    def has(self, name: str) -> bool:
        """Whether a request is kept under a name."""
        return (self._folder / f"{name}.npz").exists()

    def get(self, name: str) -> Recorded:
        """The value that an earlier step of the same run has kept under a name."""
        with np.load(self._folder / f"{name}.npz") as arrays:
            prefix, chunk = arrays["hits"].tolist()
            return Recorded(arrays["logits"], prefix_hit_tokens=prefix, chunk_hit_tokens=chunk)


@dataclass(slots=True)
class PassRun:
    """Passes on one server.

    Args:
        done: `(prompt, arm)` of the records that an earlier run left.
    """

    passes: Passes
    target: Target
    text: ModelText
    vault: Vault
    dtype: str
    done: AbstractSet[tuple[str, str]]

    def steps(self) -> Iterator[Step]:
        """Serve everything that is missing; a step for every call of every pass, and for its controls.

        Raises:
            BenchError: a control was served from the cache.
        """
        yield from self._find()
        yield from self.controls()
        for arm in self.passes.arms:
            yield from self.serve(arm)

    def _find(self) -> Iterator[Step]:
        """The finder's pass; its requests are kept until their full prefills are there."""
        finder = self.passes.finder
        if finder is None or self.vault.has("last"):
            return
        self.target.flush()
        for call in self.passes.calls:
            recorded = self._record(call, finder)
            if recorded.chunk_hit_tokens >= self.passes.min_chunk_hit:
                self.vault.put(f"found-{call.case.name}", recorded)
            yield Step(finder.name, len(call.case.prompt))
        # Whatever is spliced of the last call, that it is kept says that the pass was served to its end.
        self.vault.put("last", recorded)

    def controls(self) -> Iterator[Step]:
        """The full prefill of every measured call; where a finder chose it, also once more, and the finder's record."""
        finder = self.passes.finder
        for number, call in enumerate(self._measured()):
            name = call.case.name
            # The passes need it from the vault, which an earlier run need not have left.
            if not self.vault.has(f"full-{name}"):
                self.vault.put(f"full-{name}", self._alone(call, FULL))
            probes = self._compared(call, FULL, self.vault.get(f"full-{name}"))
            for arm in self.passes.controls:
                if self._lacks(call, arm):
                    probes += self._compared(call, arm, self._on_half(call, arm))
            if finder is not None:
                if number < RETEST_CALLS and self._lacks(call, RETEST):
                    probes += self._compared(call, RETEST, self._alone(call, RETEST))
                probes += self._compared(call, finder, self.vault.get(f"found-{name}"))
            yield Step(FULL.name, len(call.case.prompt) if finder is None else 0, probes)

    def serve(self, arm: Arm) -> Iterator[Step]:
        """Every call in order; the measured ones are compared. Nothing is served where no record is missing.

        The pass may be broken off after any step.
        """
        wanted = {call.case.name for call in self._measured() if self._lacks(call, arm)}
        if wanted:
            self.target.flush()
        for call in self.passes.calls:
            probes: list[Probe] = []
            if wanted:
                recorded = self._record(call, arm)
                if call.case.name in wanted:
                    probes = self._compared(call, arm, recorded)
            yield Step(arm.name, len(call.case.prompt), probes)

    def _measured(self) -> list[Call]:
        if self.passes.finder is None:
            chosen = self.passes.measured
            return [call for call in self.passes.calls if chosen is None or call.case.name in chosen]
        return [call for call in self.passes.calls if self.vault.has(f"found-{call.case.name}")]

    def _lacks(self, call: Call, arm: Arm) -> bool:
        return (call.case.name, arm.name) not in self.done

    def _record(self, call: Call, arm: Arm) -> Recorded:
        """Serve a call on the arm's own cache, its answer behind it."""
        case = call.case
        recorded = self.target.record(case.prompt, case.gold, arm, key=_CACHE)
        if len(call.answer) > len(case.gold):
            self.target.serve([*case.prompt, *call.answer], arm, key=_CACHE)
        return recorded

    def _alone(self, call: Call, arm: Arm) -> Recorded:
        """A full prefill, in a namespace of its own."""
        case, key = call.case, f"{arm.name}/{call.case.name}"
        recorded = self.target.record(case.prompt, case.gold, arm, key=key)
        if recorded.prefix_hit_tokens:
            raise BenchError(f"{case.name}: a full prefill was served {recorded.prefix_hit_tokens} cached tokens.")
        return recorded

    def _on_half(self, call: Call, arm: Arm) -> Recorded:
        """A control behind an exact hit on the first half of its prompt, which another request computed.

        On the full prefill's own rows an answer is the same to the last bit on a CPU; stock's hits are on others' rows.
        """
        case, key = call.case, f"{arm.name}/{call.case.name}"
        self.target.serve(case.prompt[: len(case.prompt) // 2], arm, key=key)
        recorded = self.target.record(case.prompt, case.gold, arm, key=key)
        if not recorded.prefix_hit_tokens:
            raise BenchError(f"{case.name}: half of its prompt does not stay in the pool; raise --max-total-tokens.")
        return recorded

    def _compared(self, call: Call, arm: Arm, recorded: Recorded) -> list[Probe]:
        """The record of a measured call, where it is missing."""
        if arm.is_control and recorded.chunk_hit_tokens:
            raise BenchError(f"{call.case.name}: a control was spliced: {recorded.chunk_hit_tokens} tokens.")
        if not self._lacks(call, arm):
            return []
        full = Reference(self.vault.get(f"full-{call.case.name}"))
        return [compare(full, recorded, arm, call.case, self.dtype, self.text)]
