"""What does it give to compute spliced rows again: beside the answer (repair), and while nobody waits (healing)?

Of each session three calls are served behind another clock than its text was computed behind: the first is spliced,
the second begins with its rows, and the third comes when the server has had time. An answer's loss is
KL(full prefill || served) a token, mean over its first 32 recorded tokens, each given those before it. Every arm is a
server of its own with all sessions in the same order.

    behind clock A   [call k, computed]
    behind clock B   [call k, spliced] answer   [call k + 1]   server idle   [call k + 2]

examples:
  python -m pic_bench.renewal --model .models/smollm2 --trace traces/agents.jsonl.gz --out renewal.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import msgspec
from pic_traces.encode import load_encoder
from pic_traces.source import TRACE_HELP, load

from pic_bench.fidelity import metrics
from pic_bench.fidelity.arms import FULL, Arm, parse_policy
from pic_bench.fidelity.cases.calls import Call, session_calls
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.fidelity.target import Target, serve_target
from pic_bench.frame import Finding, Result, Study, at_least, keep, result_of
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import percent
from pic_bench.serving import events

_ARMS: Final[Mapping[str, dict[str, object]]] = {
    "neither": {},
    "repair": {"repair_tokens": 1024},
    "healing": {"heal_ratio": 4.0},
}
_CALLS: Final = ("this answer", "next turn", "turn after")
_CACHE = "renewal"
_ANSWER_TOKENS = 24
_CLOCK = "The time is now {:02}:{:02}:{:02} on day {} of the week, and {} jobs are in the queue before this one.\n"
_NEIGHBOUR_TOKENS = 2000
_SPLICED_BESIDE = 6
_QUIET_S = 1.0


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call under one arm."""

    session: int
    call: str
    kl: float
    """Nats a token over the forced answer."""
    first_kl: float
    """Of its first token."""
    prefix: int
    """Tokens of the exact prefix hit."""
    spliced: int


class ArmResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server."""

    turns: list[Turn]
    renewal: dict[str, Any]
    """What it says of rows that were computed again; empty where none are."""
    neighbour_gaps_ms: list[float]
    """Between the tokens of an answer beside which spliced prompts are answered."""


class Renewal(Result, frozen=True, kw_only=True):
    """The result file."""

    model: str
    trace: str
    policy: str
    seed: int
    arms: dict[str, ArmResult]


STUDY = Study("renewal", __doc__, seed=0)
STUDY.add("--model", required=True, metavar="DIR", help="model folder, as for `sglang serve`")
STUDY.add("--trace", required=True, help=TRACE_HELP)
STUDY.add("--sessions", type=at_least(1), default=48, metavar="N", help="most sessions")
STUDY.add("--max-tokens", type=at_least(1), default=4000, metavar="N", help="longest prompt")
STUDY.add("--policy", default="most=preset:most", metavar="SPEC", help="as of `sglang-pic fidelity`")
STUDY.add("--dtype", default="bfloat16", metavar="NAME", help="number format of the servers")


@STUDY.measures
def main(args: argparse.Namespace, scratch: Path) -> Finding:
    """Serve the sessions under each arm."""
    text = ModelText(Path(args.model))
    sessions = [*_sessions(args, text)]
    policy = parse_policy(args.policy)
    full: dict[str, metrics.Floats] = {}
    arms: dict[str, ArmResult] = {}
    for name, config in _ARMS.items():
        print(f"{name}: {len(sessions)} sessions ...", file=sys.stderr)
        with serve_target(
            args.model,
            dtype=args.dtype,
            pool_tokens=60_000,
            server_args=(),
            log_path=scratch / "server.log",
            start_timeout_s=900,
            more_config=config,
        ) as target:
            run = _Run(target, policy, text, full, repairs="repair_tokens" in config)
            found = [turn for number, calls in enumerate(sessions) for turn in run.turns(number, calls)]
            renewed = renewal_of(target)
            gaps = run.neighbour_gaps_ms(sessions[-1][0])
            arms[name] = ArmResult(turns=found, renewal=renewed, neighbour_gaps_ms=gaps)
            result = result_of(Renewal, args, model=Path(args.model).name, arms=arms)
            keep(args, result)
    return Finding(result, _table(result))


def _sessions(args: argparse.Namespace, text: ModelText) -> Iterator[Sequence[Call]]:
    """Of each session the first three calls that continue each other and have an answer, until there are enough."""
    encoder, number = load_encoder(args.model), 0
    for session in load(args.trace):
        calls = [call for call in session_calls(session, number, "renewal", encoder, text) if call.case.gold]
        for turns in zip(calls, calls[1:], calls[2:], strict=False):
            prompts = [turn.case.prompt for turn in turns]
            # The template ends a prompt with a few tokens that open the answer.
            goes_on = all(two[: len(one) - 8] == one[:-8] for one, two in itertools.pairwise(prompts))
            if goes_on and len(prompts[0]) > 600 and len(prompts[2]) <= args.max_tokens:
                yield turns
                number += 1
                break
        if number == args.sessions:
            return


@dataclass(frozen=True, slots=True)
class _Run:
    """One arm; `full` are the full prefills' answers by call, `[positions, vocab]`, which all arms share."""

    target: Target
    policy: Arm
    text: ModelText
    full: dict[str, metrics.Floats]
    repairs: bool

    def turns(self, number: int, calls: Sequence[Call]) -> Iterator[Turn]:
        """Serve the calls of a session."""
        old, new = (self.text.ids(_clock(2 * number + at)) for at in (0, 1))
        self.target.serve([*old, *calls[0].case.prompt], self.policy, key=_CACHE)
        for name, call in zip(_CALLS, calls, strict=True):
            prompt, gold = [*new, *call.case.prompt], call.case.gold
            spliced = 0
            if self.repairs and name == _CALLS[0]:
                # With a repair an answer goes on behind other rows than its first token: it is forced afterwards.
                spliced = self.target.answer(prompt, self.policy, _ANSWER_TOKENS, key=_CACHE).spliced_tokens
                self._settle()
            recorded = self.target.record(prompt, gold, self.policy, key=_CACHE, donors_from=None, keys=False)
            self._settle()
            apart = metrics.divergence(self._full(call, prompt), metrics.log_softmax(recorded.logits))[: len(gold)]
            yield Turn(
                session=number,
                call=name,
                kl=float(apart.mean()),
                first_kl=float(apart[0]),
                prefix=recorded.prefix_hit_tokens,
                spliced=spliced or recorded.chunk_hit_tokens,
            )

    def _full(self, call: Call, prompt: Sequence[int]) -> metrics.Floats:
        name = call.case.name
        if name not in self.full:
            alone = self.target.record(prompt, call.case.gold, FULL, key=name, donors_from=None, keys=False)
            self.full[name] = metrics.log_softmax(alone.logits)
        return self.full[name]

    def _settle(self) -> None:
        """Until nothing waits to be computed again, or nothing more is allowed to be."""
        renewal, since = renewal_of(self.target), time.monotonic()
        while renewal and renewal["num_waiting"] and time.monotonic() - since < _QUIET_S:
            time.sleep(0.05)
            if (found := renewal_of(self.target)) != renewal:
                renewal, since = found, time.monotonic()

    def neighbour_gaps_ms(self, call: Call) -> list[float]:
        """Stream an answer while spliced prompts are answered beside it, one after the other."""
        prompts = [[*self.text.ids(_clock(1000 + at)), *call.case.prompt] for at in range(_SPLICED_BESIDE)]

        def answer_all() -> None:
            for prompt in prompts:
                self.target.answer(prompt, self.policy, _ANSWER_TOKENS, key=_CACHE)

        neighbour = self.text.ids(_clock(999))
        with ThreadPoolExecutor(1) as pool:
            stream = events(self.target.server.base_url, neighbour, _NEIGHBOUR_TOKENS, extra_key="neighbour")
            next(stream)
            beside = pool.submit(answer_all)
            times = [time.perf_counter()]
            for _ in stream:
                times.append(time.perf_counter())
                if beside.done():
                    break
            beside.result()
        return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]


def renewal_of(target: Target) -> dict[str, Any]:
    """What a server says of rows that were computed again; empty where none are."""
    (state, *_) = msgspec.json.decode(target.server.get("/server_info"))["internal_states"]
    found: dict[str, Any] = state["pic"].get("renewal", {})
    return found


def _clock(number: int) -> str:
    return _CLOCK.format(number % 24, number % 60, number % 59, number % 7, number)


def _table(result: Renewal) -> Table:
    header = ["rows computed again", *_CALLS, "computed again / spliced", "gaps of a neighbour: median, longest"]
    rows = []
    for name, arm in result.arms.items():
        losses = [fmean(turn.kl for turn in arm.turns if turn.call == call) for call in _CALLS]
        again = arm.renewal.get("num_repaired", 0) + arm.renewal.get("num_healed", 0)
        share = again / arm.renewal["num_spliced"] if arm.renewal else 0.0
        gaps = f"{median(arm.neighbour_gaps_ms):.0f}, {max(arm.neighbour_gaps_ms):.0f} ms"
        rows.append([name, *(f"{loss:.4f}" for loss in losses), percent(share), gaps])
    return Table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
