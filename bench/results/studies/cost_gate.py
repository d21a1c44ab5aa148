"""What the cost gate decides on simulated machines, against an oracle that knows the machine.

A machine's pass takes the longer of its launches and of its arithmetic or weights, layer by layer, plus attention over
the context. That is more than the gate's model knows. The gate learns by the plugin's own code from noisy times.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from pic_bench import frame
from pic_bench.report.markdown import Table

from sglang_pic.core import CostModel
from sglang_pic.core.costs import FEW_TOKENS, GapTimings, Timing, learn_costs

CHUNK = 8_192
"""Most tokens that one pass computes."""
PROMPTS = (128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
RUNS = (64, 128, 256, 512, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000)
GAPS = (1, 4)
BEFORE = (0, 2_048)


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on a device, by what it reaches in practice; an assumption, not a measurement."""

    name: str
    active_billion: float
    """Parameters that a token multiplies."""
    weights_gb: float
    """What one pass over many tokens reads, on one device."""
    layers: int
    hidden: int
    row_kb: float
    """KV of a token, all layers, on one device."""
    tflops: float
    """Of all its devices together, as prefill reaches it."""
    bandwidth_gb_s: float
    """Of one device."""
    eager_layer_us: float = 110.0
    """Launching one layer from Python."""
    graph_layer_us: float = 35.0
    """The same with a breakable graph: its segments and attention."""
    layer_us: float = 12.0
    """What a layer takes beside arithmetic and weights: tails of kernels, reductions among devices."""
    gaps_run_eagerly: bool = False
    around_us: float = 400.0
    """The host's work and launches around a spliced pass."""
    gap_us: float = 4.0
    noise: float = 0.02
    """Mean of what other work adds to a time, as a share of it; exponential."""

    def pass_us(self, num_tokens: int, context: float, *, num_gaps: int = 0, eager: bool = False) -> float:
        """A pass over `num_tokens` that see `context` tokens each, on the mean."""
        arithmetic = 2e3 * self.active_billion * num_tokens / self.tflops
        attention = 4e-6 * self.layers * self.hidden * num_tokens * context / (0.5 * self.tflops)
        weights = 1e6 * self.weights_gb / (0.8 * self.bandwidth_gb_s)
        device = max(arithmetic, weights) + attention + self.layers * self.layer_us + num_gaps * self.gap_us
        return max(device, self.layers * (self.eager_layer_us if eager else self.graph_layer_us))

    def copy_us(self, num_rows: int) -> float:
        """Rows read and written."""
        return 30.0 + 2e3 * self.row_kb * num_rows / (0.8e3 * self.bandwidth_gb_s)

    def prefill_us(self, num_left: int, num_spliced: int, num_gaps: int, num_before: int) -> float:
        """A prompt's prefill in passes of at most `CHUNK` tokens, `num_before` of others in the first."""
        left = num_before + num_left - num_spliced
        eager = self.gaps_run_eagerly and num_spliced > 0
        passes = (min(CHUNK, left - done) for done in range(0, left, CHUNK))
        total = sum(self.pass_us(tokens, num_left / 2, num_gaps=num_gaps, eager=eager) for tokens in passes)
        return total + (self.around_us + self.copy_us(num_spliced) if num_spliced else 0.0)


class Simulated:
    """The machine under the plugin's stopwatch (`core.costs.Stopwatch`)."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._machine, self._random = machine, random.Random(seed)

    def _time(self, us: float) -> Timing:
        noise = self._machine.noise
        return Timing.of([us * (1 + noise * self._random.expovariate(1.0)) for _ in range(5)])

    def prefill(self, num_tokens: int) -> Timing:
        return self._time(self._machine.pass_us(num_tokens, num_tokens / 2))

    def splice(self, num_rows: int) -> Timing:
        return self._time(self._machine.copy_us(num_rows))

    def gaps(self, num_gaps: int) -> GapTimings:
        machine = self._machine
        around_us = machine.around_us + machine.copy_us(56)
        one, many = (
            machine.pass_us(FEW_TOKENS, 40, num_gaps=num - 1, eager=machine.gaps_run_eagerly) + around_us
            for num in (1, num_gaps)
        )
        return GapTimings(self._time(one), self._time(many), self._time(around_us))


MACHINES = msgspec.toml.decode(Path(__file__).with_name("machines.toml").read_bytes(), type=dict[str, list[Machine]])
"""Those that are `reported`, and others `for_choosing` the gate's constants."""


class Score(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rule loses against the oracle, over the grid."""

    wrong: float
    """Share of the cases that it decides otherwise than the oracle."""
    lost: float
    """Time lost, as a share of what the oracle saves in all cases."""
    worst_ms: float
    """Most time lost in one case."""
    worst: tuple[int, int, int, int]
    """That case: tokens left of the prompt, tokens of its runs, runs, tokens of others in the pass."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine."""

    machine: Machine
    num_cases: int
    oracle_splices: float
    """Share of the cases that the oracle splices."""
    learnt: CostModel
    """With the first seed."""
    gate: Score
    always: Score
    short_slope: Score
    """A gate that counts what 256 tokens take more than 32, and neither floors nor a cost per request."""


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result."""

    seeds: tuple[int, ...]
    reported: tuple[Row, ...]
    for_choosing: tuple[Row, ...]
    schema_version: int = 1


Case = tuple[int, int, int, int]
Rule = Callable[[Case], bool]


STUDY = frame.Study("cost_gate", __doc__)
STUDY.add("--seeds", type=frame.at_least(1), default=20, metavar="N", help="calibrations of each machine")


@STUDY.measures
def main(args: argparse.Namespace, _logs: Path) -> frame.Finding:
    """Study every machine."""
    seeds = range(args.seeds)
    reported, for_choosing = (
        tuple(study_machine(shown, seeds) for machine in MACHINES[name] for shown in both_ways(machine))
        for name in ("reported", "for_choosing")
    )
    return frame.Finding(Study(seeds=tuple(seeds), reported=reported, for_choosing=for_choosing), _table(reported))


def both_ways(machine: Machine) -> list[Machine]:
    """Its passes with gaps in a graph, and without one, where that takes longer."""
    if machine.eager_layer_us == machine.graph_layer_us:
        return [machine]
    eager = msgspec.structs.replace(machine, name=f"{machine.name}, gaps eager", gaps_run_eagerly=True)
    return [machine, eager]


def study_machine(machine: Machine, seeds: Sequence[int]) -> Row:
    """Every case of the grid, decided by what each calibration learnt."""
    cases = [(p, r, g, b) for p in PROMPTS for r in RUNS for g in GAPS for b in BEFORE if r < p]
    learnt = [learn_costs(Simulated(machine, s), max_tokens=CHUNK, max_rows=1 << 16, max_gaps=64) for s in seeds]
    short = [_short_slope(machine, seed) for seed in seeds]
    saved = {case: _saved_us(machine, case) for case in cases}
    return Row(
        machine=machine,
        num_cases=len(cases),
        oracle_splices=sum(us > 0 for us in saved.values()) / len(cases),
        learnt=learnt[0],
        gate=_score(saved, [_gate(cost) for cost in learnt]),
        always=_score(saved, [lambda _: True]),
        short_slope=_score(saved, [_gate(cost) for cost in short]),
    )


def _saved_us(machine: Machine, case: Case) -> float:
    left, run, num_gaps, before = case
    return machine.prefill_us(left, 0, 0, before) - machine.prefill_us(left, run, num_gaps, before)


def _gate(cost: CostModel) -> Rule:
    def takes(case: Case) -> bool:
        left, run, num_gaps, before = case
        whole = cost.request_saves(num_computed=left - run, num_spliced=run, num_gaps=num_gaps, num_before=before)
        return cost.saves(run // num_gaps, 1) > 0 and whole > 0

    return takes


def _short_slope(machine: Machine, seed: int) -> CostModel:
    stopwatch = Simulated(machine, seed)
    few, many, copy = stopwatch.prefill(32).us, stopwatch.prefill(256).us, stopwatch.splice(256).us
    return CostModel(computed_token_us=max(0.0, many - few) / 224, spliced_token_us=copy / 256, gap_us=machine.gap_us)


def _score(saved: dict[Case, float], rules: Sequence[Rule]) -> Score:
    lost = {case: [abs(us) * (rule(case) != (us > 0)) for rule in rules] for case, us in saved.items()}
    could = sum(max(0.0, us) for us in saved.values())
    worst = max(lost, key=lambda case: max(lost[case]))
    return Score(
        wrong=sum(us > 0 for each in lost.values() for us in each) / (len(lost) * len(rules)),
        lost=sum(map(sum, lost.values())) / (could * len(rules)),
        worst_ms=max(lost[worst]) / 1e3,
        worst=worst,
    )


def _table(rows: Sequence[Row]) -> Table:
    header = ["machine", "oracle splices", "gate: decides otherwise", "loses", "at worst"]
    cells = [
        [
            *(row.machine.name, f"{row.oracle_splices:.0%}", f"{row.gate.wrong:.1%}", f"{row.gate.lost:.2%}"),
            *(f"{row.gate.worst_ms:.2f} ms", f"{row.always.lost:.2%}", f"{row.short_slope.lost:.2%}"),
        ]
        for row in rows
    ]
    return Table([*header, "always splicing loses", "32 against 256 tokens loses"], cells)


if __name__ == "__main__":
    sys.exit(main())
