"""The experiment TURNS: a growing conversation with a field that changes at every turn, under each policy.

A pass serves every turn under one policy, after a flush, in a namespace that lives on: what a turn splices, later turns
may build on. A pass that was broken off is served again from its first turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from pic_bench.fidelity.arms import EDIT_ARMS, FULL, Arm
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.measure import Reference, compare
from pic_bench.fidelity.record import Donors, Probe
from pic_bench.fidelity.target import Recorded, Target
from pic_bench.fidelity.trace import Step
from pic_bench.fidelity.vault import Vault
from sglang_pic.errors import BenchError

POLICIES = tuple(msgspec.structs.replace(arm, donors=Donors.TRACE) for arm in EDIT_ARMS)
"""Where the command line names none."""


@dataclass(slots=True)
class TurnsRun:
    """One conversation under all policies, on one server.

    Args:
        arms: of which a record is missing.
        vault: the full prefills', which all passes are compared with.
        done: `(prompt, arm)` of the records that an earlier run left.
    """

    turns: Sequence[Case]
    arms: Sequence[Arm]
    text: ModelText
    vault: Vault
    dtype: str
    done: frozenset[tuple[str, str]]

    @property
    def cost(self) -> int:
        """Prompt tokens of all passes."""
        return (1 + len(self.arms)) * sum(len(case.prompt) for case in self.turns)

    def steps(self, target: Target) -> Iterator[Step]:
        """Serve everything that is missing; a step for every turn of every pass.

        Raises:
            BenchError: a full prefill was served from the cache.
        """
        for case in self.turns:
            yield self._step(self._full(case, target), FULL, case)
        for arm in self.arms:
            target.flush()
            for case in self.turns:
                recorded = target.record(case.prompt, case.gold, arm, key=_CACHE, donors_from=None, keys=False)
                yield self._step(recorded, arm, case)

    def _step(self, recorded: Recorded, arm: Arm, case: Case) -> Step:
        probes: list[Probe] = []
        if (case.name, arm.name) not in self.done:
            full = Reference(recorded if arm == FULL else self.vault.get(case.name))
            probes.append(compare(full, recorded, arm, case, self.dtype, self.text))
        return Step(arm.name, len(case.prompt), probes)

    def _full(self, case: Case, target: Target) -> Recorded:
        """The full prefill, computed once for all passes."""
        if not self.vault.has(case.name):
            key = f"full/{case.name}"
            recorded = target.record(case.prompt, case.gold, FULL, key=key, donors_from=key, keys=False)
            if recorded.prefix_hit_tokens or recorded.chunk_hit_tokens:
                raise BenchError(f"{case.name}: a full prefill was served {recorded.prefix_hit_tokens} cached tokens.")
            self.vault.put(case.name, recorded)
        return self.vault.get(case.name)


# Each pass begins with a flush, so one namespace serves them all.
_CACHE = "turns"
