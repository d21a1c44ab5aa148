"""Serves sessions on a patched server whose KV pool is far too small, with faults, and accounts for everything.

Recorded and generated sessions are played for minutes. Requests are aborted, clients go away in the middle of a stream,
options are wrong, prompts are pinned and dropped, the cache is flushed, requests are retracted and rows evicted all the
time; in some setups splicing is switched off and on, or a store goes away and comes back. After each round of
sessions the server comes to rest, and every slot, lock and index entry is accounted for. Every row that is spliced
or read is compared with a table of what was computed where. Answers of requests with mode off are compared with those
of a stock server in float32. With PD disaggregation the patched server is a pair: rows are watched on the prefill
server, and SGLang's checksum compares those that the decode server reads. Before all that two faults are made on
purpose, which the checkers must find.

Several setups are soaked one after the other, and each prints one JSON object of counts. With --out each has a file of
its own: FILE, with the setup's name behind a dash if there are several. Exit code: 0 where mismatches, leaks,
stale_rows, failures and spliced_while_off are 0 and the controls were found, 1 otherwise or where a server ended,
130 interrupted.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path

import msgspec
from pic_models import prepare
from pic_traces.encode import load_encoder

from pic_bench.compare.arms import build_arms
from pic_bench.compare.server import Server
from pic_bench.serving import arm_server, side_by_side
from pic_bench.soak.client import Judge, Outcome, send
from pic_bench.soak.load import SETTING, Fault, Request, Session, Setup, requests, sessions
from pic_bench.soak.pair import pair_of
from pic_bench.soak.watched_server import Memory, WatchedServer
from pic_bench.study_command import Finding, Result, Study, add_options, keep, progress, result_of
from sglang_pic.errors import BenchError, ConfigError

_SAMPLE_S = 0.5
_PAUSE_S = 3.0
_MAX_WORDS = 20
_SWITCHED_S = 1.0
"""So long after splicing was switched off nothing may be spliced any more."""
_NUM_MISMATCHES = 8
_STORE = "store"

STUDY = Study("soak", __doc__, seed=0)
STUDY.options("logs", "quiet")
add_options(STUDY.parser, Path(__file__).with_name("options.toml"))


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults made on purpose before the load, which the checkers must find."""

    stale_rows: int
    """Of a request whose donors were unlocked before they were copied."""
    mismatches: int
    """Of `num_mismatches` prompts with one other token in the middle, those whose answers were told from the right."""
    num_mismatches: int


class Soak(Result, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The counts of a run. Those from `mismatches` to `failures` must be 0. Earlier runs counted more."""

    setup: str = ""
    """Its name in soak.toml; earlier runs had none."""
    model: str
    seed: int
    page_size: int
    pool_tokens: int
    seconds: float
    """From the first request to the last idle point."""
    requests: int
    outcomes: dict[str, int]
    """Requests by how they ended: answered, ended by a fault that was injected, or failed."""
    faults: dict[str, int]
    """By kind, as injected; a request may be answered before its fault meets it."""
    idle_points: int
    flushes: int
    tokens: dict[str, int]
    """Prompt tokens of admitted requests, by source."""
    evicted_tokens: int
    retractions: int
    fallbacks: dict[str, int]
    """Runs that were not spliced, by why."""
    audited: int
    spliced_rows_checked: int
    fetched_rows_checked: int = 0
    compared: int
    """Answers of `off` requests that a stock server gave, too."""
    mismatches: int
    leaks: int
    stale_rows: int
    failures: int
    """Requests that ended in a way that no fault explains, and errors in the server's log."""
    switches: int = 0
    """How often splicing was switched off, and on again."""
    spliced_while_off: int = 0
    """Tokens that were spliced later than a second after that."""
    what: list[str]
    """The first count that is not 0, in words."""
    memory: Memory
    control: Control | None

    @property
    def is_clean(self) -> bool:
        """Whether all that must be 0 is, and the checkers found what was made wrong on purpose."""
        can_find = self.control is None or (
            self.control.stale_rows > 0 and self.control.mismatches == self.control.num_mismatches
        )
        faults = self.mismatches, self.leaks, self.stale_rows, self.failures, self.spliced_while_off
        return can_find and not any(faults)


@STUDY.measures
def main(args: argparse.Namespace, scratch: Path) -> Finding:
    """Run the soaks; the counts so far are kept after each round."""
    names = [*SETTING.setups] if args.setups == "all" else args.setups.split(",")
    if unknown := [name for name in names if name not in SETTING.setups]:
        raise ConfigError(f"--setups {unknown[0]}: must be among {', '.join(SETTING.setups)}, or all.")
    out, found = args.out, []
    for name in names:
        args.out = out.with_stem(f"{out.stem}-{name}") if out and len(names) > 1 else out
        found.append(_soak(args, name, (args.logs or scratch) / name))
    lines = (msgspec.json.encode(each).decode() for each in found)
    return Finding(
        found[0] if len(found) == 1 else None, "\n".join(lines), 0 if all(each.is_clean for each in found) else 1
    )


def _soak(args: argparse.Namespace, name: str, logs: Path) -> Soak:
    """The counts of one setup."""
    setup = SETTING.setups[name]
    logs.mkdir(parents=True, exist_ok=True)
    model = prepare(setup.model, args.models / setup.model)
    encoder = load_encoder(str(model))
    with _servers(args.models, model, setup, logs) as (stock, pic):
        watched, judge = WatchedServer(pic), Judge(stock)
        control = _control(args.seed, setup, watched, judge) if setup.page_size == 1 else None
        stale, now = watched.stale_rows(), time.monotonic()
        run = _Run(args, name, setup, logs / _STORE, watched, judge, control, stale, now)
        waiting = enumerate(sessions(encoder, args.seed))
        rng = random.Random(args.seed)
        known: set[str] = set()
        with progress(total=round(args.seconds), unit="s", desc=name, quiet=args.quiet) as bar:
            while time.monotonic() < run.deadline:
                run.round(list(islice(waiting, setup.num_sessions)), rng)
                result = run.account()
                keep(args, result)
                for problem in result.what:
                    if problem not in known:
                        known.add(problem)
                        bar.write(problem, file=sys.stderr)
                bar.set_postfix(requests=run.outcomes.total(), refresh=False)
                bar.update(round(min(time.monotonic() - run.started_at, args.seconds)) - bar.n)
    return result


@dataclass(slots=True)
class _Run:
    """The state that the rounds of a soak share."""

    args: argparse.Namespace
    name: str
    setup: Setup
    store: Path
    """Its folder, if it has one."""
    watched: WatchedServer
    judge: Judge
    control: Control | None
    stale_before: Counter[str]
    """Wrong rows that the control made."""
    started_at: float
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """As injected."""
    failures: list[str] = field(default_factory=list)
    num_flushes: int = 0
    num_switches: int = 0
    num_spliced_off: int = 0
    off_at: float | None = None
    """When splicing was switched off, while it is."""
    spliced_at_off: int | None = None
    """Tokens that were spliced until a second later, once that has passed."""

    @property
    def deadline(self) -> float:
        """When no further request is sent."""
        return self.started_at + self.args.seconds

    def round(self, played: Sequence[tuple[int, Session]], rng: random.Random) -> None:
        """Play sessions side by side, then let the server come to rest and account for everything."""
        with ThreadPoolExecutor(len(played)) as pool:
            waiting = {pool.submit(self._play, session, number) for number, session in played}
            flush_in = rng.randrange(8)
            for tick in count():
                done, waiting = wait(waiting, timeout=_SAMPLE_S)
                for fault, outcome in chain.from_iterable(future.result() for future in done):
                    self.faults[fault.value] += 1
                    self.outcomes[outcome.how] += 1
                    self.failures += [outcome.failure] if outcome.failure else []
                self.watched.server.check_alive()
                self.watched.sample_memory()
                if not waiting:
                    break
                if tick == flush_in:
                    self._flush_while_busy()
                if "store" in self.setup.parts:
                    self._trouble_store(rng)
                if self.setup.is_switched:
                    self._switch(rng)
        self._switch_on()
        self.watched.wait_idle()
        if rng.random() < 0.15:
            time.sleep(_PAUSE_S)
            self.watched.wait_idle()
        # Rows that left for a host are donors of later rounds.
        if self.num_flushes == 0 or rng.random() < (0.3 if "host" in self.setup.parts else 0.9):
            self.watched.flush()
            self.num_flushes += 1

    def account(self) -> Soak:
        """The counts so far; at an idle point."""
        watched, verdicts = self.watched, self.judge.verdicts
        mismatches = [verdict for verdict in verdicts if verdict is not None]
        accounting, counters, stale = watched.wait_idle(), watched.counters(), watched.stale_rows() - self.stale_before
        failures = [*self.failures, *watched.log_faults()]
        words = [*mismatches, *watched.leaks, *(f"{n} rows {what}" for what, n in stale.items()), *failures]
        return result_of(
            Soak,
            self.args,
            setup=self.name,
            model=self.setup.model,
            page_size=self.setup.page_size,
            pool_tokens=self.setup.pool_tokens,
            seconds=round(time.monotonic() - self.started_at, 1),
            requests=self.outcomes.total(),
            outcomes=dict(sorted(self.outcomes.items())),
            faults={fault: number for fault, number in sorted(self.faults.items()) if fault != Fault.NONE.value},
            idle_points=watched.num_idle_points,
            flushes=self.num_flushes,
            tokens=_by_label(counters, "tokens"),
            evicted_tokens=accounting["num_evicted_tokens"],
            retractions=counters["retractions"],
            fallbacks=_by_label(counters, "fallbacks"),
            audited=watched.num_audited(),
            spliced_rows_checked=accounting["num_spliced_rows"],
            fetched_rows_checked=accounting["num_fetched_rows"],
            compared=len(verdicts),
            mismatches=len(mismatches),
            leaks=len(watched.leaks),
            stale_rows=stale.total(),
            failures=len(failures),
            switches=self.num_switches,
            spliced_while_off=self.num_spliced_off,
            what=words[:_MAX_WORDS],
            memory=watched.memory(self.started_at),
            control=self.control,
        )

    def _play(self, session: Session, number: int) -> list[tuple[Fault, Outcome]]:
        ended = []
        for request in requests(session, number, self.args.seed, with_images=self.setup.has_images):
            if time.monotonic() > self.deadline:
                break
            self.watched.note_pin(request)
            # While splicing is off every answer is a stock server's.
            off = self._time_off if request.fault is Fault.NONE and request.logprob_start is None else None
            sent = request if off is None else request._replace(is_compared=True)
            outcome = send(self.watched.server, sent)
            is_exact = request.is_compared or (off is not None and off == self._time_off)
            if outcome.answer is not None and is_exact:
                self.judge.compare(sent, outcome.answer)
            ended.append((request.fault, outcome))
        return ended

    @property
    def _time_off(self) -> int | None:
        """Which time it is that splicing is off, once it has been for a second; None else."""
        return None if self.spliced_at_off is None else self.num_switches

    def _switch(self, rng: random.Random) -> None:
        """Switch splicing off or on by chance."""
        if self.off_at is None:
            if rng.random() < 0.2:
                self.set_mode(0)
                self.off_at, self.num_switches = time.monotonic(), self.num_switches + 1
        elif self.spliced_at_off is None:
            if time.monotonic() - self.off_at > _SWITCHED_S:
                self.spliced_at_off = self._num_spliced()
        elif rng.random() < 0.3:
            self._switch_on()

    def _switch_on(self) -> None:
        if self.spliced_at_off is not None:
            self.num_spliced_off += self._num_spliced() - self.spliced_at_off
        if self.off_at is not None:
            self.off_at = self.spliced_at_off = None
            self.set_mode(1)

    def set_mode(self, mode: int) -> None:
        """Switch splicing off or on."""
        self.watched.server.post("/set_internal_state", {"server_args": {"pic_mode": mode}})

    def _num_spliced(self) -> int:
        return _by_label(self.watched.counters(), "tokens").get("chunk", 0)

    def _trouble_store(self, rng: random.Random) -> None:
        """By chance take the store's folder away, for seconds."""
        folder, away, draw = self.store, self.store.with_suffix(".away"), rng.random()
        if away.exists():
            if draw < 0.3:
                away.rename(folder)
        elif draw < 0.06 and folder.exists():
            folder.rename(away)
            self.faults["store gone"] += 1

    def _flush_while_busy(self) -> None:
        """A flush that SGLang refuses, unless no request runs at that moment."""
        try:
            self.watched.server.post("/flush_cache", {})
        except BenchError:
            self.faults["flush while busy"] += 1
        else:
            self.num_flushes += 1


def _control(seed: int, setup: Setup, watched: WatchedServer, judge: Judge) -> Control:
    """Unlock donors too early, and ask for other prompts' answers: both must be found.

    The donors' request and the one that is spliced fit into the pool together only where the donors are given up. The
    slots that they leave are then the last ones that the second request gets: in its prompt's end, which is computed.
    """
    watched.flush()
    before = watched.stale_rows()
    rng = random.Random(seed)
    document, end = _random_tokens(rng, (setup.pool_tokens - 70) // 2), _random_tokens(rng, 250)
    unlocking = {"testing": {"unlock_donors": True}}
    for prompt, pic in ((document, None), ([*_random_tokens(rng, 40), *document, *end], unlocking)):
        send(watched.server, Request("control", prompt, 4, pic, is_compared=True, dp_rank=0))
    stale = watched.stale_rows() - before
    prompts = [_random_tokens(rng, 400) for _ in range(_NUM_MISMATCHES)]
    found = sum(
        judge.control(Request(f"control-{seed}", prompt, 4, {"mode": "off"}, is_compared=True, dp_rank=0), seed)
        for seed, prompt in enumerate(prompts)
    )
    return Control(stale_rows=stale.total(), mismatches=found, num_mismatches=_NUM_MISMATCHES)


def _by_label(counters: Mapping[str, int], name: str) -> dict[str, int]:
    """A labelled counter's numbers by label, those that are not 0."""
    beginning = f"{name}_total{{"
    return {key.split("=")[1].rstrip("}"): n for key, n in counters.items() if n and key.startswith(beginning)}


def _random_tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(number)]


@contextmanager
def _servers(models: Path, model: Path, setup: Setup, logs: Path) -> Iterator[tuple[Server, Server]]:
    """The stock server and the watched one, with PD disaggregation a `Pair`."""
    for draft in re.findall(r"\{models\}/(\S+)", setup.draft or ""):
        prepare(draft, models / draft)
    patched = setup.patched_flags.replace("{models}", str(models)).replace("{store}", str(logs / _STORE))
    both, roomy, tight = map(shlex.split, (SETTING.flags["both"], SETTING.flags["stock"], patched))
    both += ["--page-size", str(setup.page_size)]
    stock, pic = build_arms(["stock", "pic"], server_args=both, pic_config=msgspec.json.encode(SETTING.config).decode())
    variables = SETTING.environment
    servers = [
        arm_server(str(model), stock, logs / "stock.log", flags=roomy, env=variables["stock"]),
        arm_server(*(str(model), pic, logs / "pic.log"), flags=tight, probe=SETTING.probe, env=variables["patched"]),
    ]
    if "prefill" in setup.parts:
        decode = arm_server(
            *(str(model), pic, logs / "decode.log"), flags=shlex.split(setup.decode_flags), env=variables["patched"]
        )
        servers = [servers[0], pair_of(servers[1], decode), decode]
    with side_by_side(servers):
        yield servers[0], servers[1]


if __name__ == "__main__":
    sys.exit(main())
