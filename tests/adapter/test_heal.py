"""Rows that are computed again: which, when, how many, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pic.adapter import between_rounds
from sglang_pic.adapter.between_rounds import Passes
from sglang_pic.adapter.heal.healer import Healer
from sglang_pic.adapter.heal.metrics import TOKENS, HealEnd
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.prompt_pass import STEP_TOKENS
from sglang_pic.adapter.serve.auditor import Auditor
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.media import Media
from sglang_pic.adapter.serve.publication import Publication
from sglang_pic.adapter.serve.resolver import TreeResolver
from sglang_pic.adapter.serve.state import Counted
from sglang_pic.config import PicConfig
from sglang_pic.core import MOST_REUSE, ContentIndex, Exactness, RowNames, as_tokens
from tests.adapter.audit_bench import Runner, Scheduler, Tree
from tests.adapter.builders import Kept, hooks_of, request, request_state

pytestmark = pytest.mark.usefixtures("no_groups")

SPACE = Namespace(None, None)
PROMPT = [7 * i % 1000 for i in range(3 * STEP_TOKENS)]
SPLICED = (STEP_TOKENS - 56, 2 * STEP_TOKENS)


class Bench:
    """A healer, and a tree that holds one path in the slots behind 500, of which `SPLICED` was spliced."""

    def __init__(self, page_size: int = 1, **settings: Any) -> None:
        self.runner, self.scheduler, self.series = Runner(), Scheduler(), Kept()
        self.index = ContentIndex(MOST_REUSE, names=RowNames(page_size))
        self.media: Media | None = None
        """Of the requests."""
        tree: Any = Tree(page_size, 0)
        tree.page_size, tree.auditor, tree.recovered = page_size, Auditor(), []
        tree.donors = torch.arange(500, 500 + len(PROMPT))
        tree.publication = Publication(self.index, frozenset())
        tree.planning = SimpleNamespace(resolver=lambda tree: TreeResolver(tree, RowNames(page_size)))
        tree.recover = lambda *found, **_: tree.recovered.append(found)
        self.tree = tree
        self.publish(PROMPT, SPLICED)
        self.healer = Healer(self.runner, tree, PicConfig(**settings), self.series, Passes())  # type: ignore[arg-type]

    def publish(self, tokens: Sequence[int], spliced: tuple[int, int]) -> None:
        behind = [(spliced[0], len(tokens))]
        computed = [(0, spliced[0]), (spliced[1], len(tokens))]
        self.index.publish(SPACE, as_tokens(tokens), computed, spliced=[spliced], approximate=behind)

    def repair(self, max_new_tokens: int = 64, *, adopted_from: int = 100, num_tokens: int = len(PROMPT)) -> Any:
        """A request was served: the tree adopted its rows from a position on."""
        state = request_state(namespace=SPACE, spliced=[SPLICED], matched_len=100, media=self.media)
        req = request(PROMPT[:num_tokens], pic=state)
        req.sampling_params.max_new_tokens = max_new_tokens
        self.healer.published(req, num_tokens, adopted_from)
        return req

    def heal(self, num_spliced: int = 0, num_tokens: int = len(PROMPT)) -> None:
        """A request begins with the path, and splices some more."""
        prefix = Exactness(SPLICED[0], 0, num_tokens - SPLICED[0])
        state = request_state(namespace=SPACE, matched_len=num_tokens, prefix=prefix)
        state.media = self.media
        state.admitted_from, state.num_inherited = num_tokens, prefix.approximate_len
        state.counted = Counted(num_spliced)
        self.healer.admitted(request([*PROMPT[:num_tokens], 5], pic=state))

    def run(self, rounds: int = 20, *, idle: bool = True) -> None:
        self.scheduler.is_idle = idle
        for _ in range(rounds):
            _ = self.healer.step_if_idle(self.scheduler) if idle else self.healer.step_if_due(self.scheduler)

    @property
    def written(self) -> list[int]:
        """The positions whose rows were written, and how often a pass ran."""
        return (self.runner.rows.nonzero().flatten() - 500).tolist()

    @property
    def ended(self) -> dict[str, int]:
        return self.healer.report().ended


@pytest.fixture(autouse=True)
def _rows_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of few lines reads rows that passes wrote; here others wrote most of them."""
    monkeypatch.setattr("tests.adapter.audit_bench.logits_of", lambda _: torch.zeros(50))


def test_a_repair_computes_the_end_from_its_first_spliced_row_on_beside_the_answer() -> None:
    bench = Bench(repair_tokens=400)
    bench.repair()
    bench.run(1, idle=False)
    first = len(PROMPT) - 400
    assert bench.written == [*range(first, first + STEP_TOKENS)], "one step a round, in the tree's own slots"
    bench.run(2, idle=False)
    assert bench.written == [*range(first, len(PROMPT))]
    assert bench.series.by_label(TOKENS) == {"repair": 400}
    assert bench.ended == {HealEnd.DONE.value: 1}
    assert bench.index.exactness(SPACE, as_tokens(PROMPT)).exact_len == SPLICED[0], "what stands before is spliced"
    assert bench.tree.num_locks == 0


def test_a_prompt_is_repaired_once_for_each_row() -> None:
    """A request that is retracted has its prompt computed and spliced anew."""
    bench = Bench(repair_tokens=1024)
    req = bench.repair()
    bench.healer.published(req, len(PROMPT), 100)
    assert bench.healer.report().num_waiting == 1
    req.pic.release_row()
    req.pic.spliced = [SPLICED]
    bench.healer.published(req, len(PROMPT), 100)
    assert bench.healer.report().num_waiting == 2


@pytest.mark.parametrize(
    "asked",
    [{"max_new_tokens": 16}, {"adopted_from": SPLICED[1]}, {"num_tokens": SPLICED[0]}],
    ids=["short answer", "rows of others", "nothing spliced"],
)
def test_nothing_is_repaired(asked: dict[str, int]) -> None:
    bench = Bench(repair_tokens=1024)
    bench.repair(**asked)
    assert not bench.healer.has_work


def test_a_prompt_with_images_is_left_alone() -> None:
    """A pass of ours computes token ids alone."""
    bench = Bench(repair_tokens=1024, heal_ratio=100)
    bench.media = Media(((3, 9),), (1 << 30,))
    bench.repair()
    bench.heal(num_spliced=10_000)
    assert not bench.healer.has_work


def test_rows_that_others_had_computed_are_left_alone() -> None:
    """The tree keeps the rows of whoever came first."""
    bench = Bench(repair_tokens=1024)
    bench.repair(adopted_from=300)
    bench.run(1, idle=False)
    assert bench.written[0] == 300
    # Meanwhile they were evicted, and another request computed all of it.
    bench.index.publish(SPACE, as_tokens(PROMPT[:700]), [(0, 700)])
    bench.run(5, idle=False)
    assert bench.written == [*range(300, 300 + STEP_TOKENS), *range(700, len(PROMPT))]


def test_a_prompt_that_comes_again_is_healed_at_idle_as_far_as_splices_have_saved() -> None:
    bench = Bench(heal_ratio=0.5)
    bench.heal(num_spliced=2 * STEP_TOKENS - 1)
    bench.run()
    assert not bench.healer.has_work, "less than a step is allowed"
    bench.heal(num_spliced=1)
    bench.run(5, idle=False)
    assert not bench.written, "somebody is served"
    bench.run()
    assert bench.written == [*range(SPLICED[0], SPLICED[0] + STEP_TOKENS)]
    tokens = as_tokens(PROMPT)
    assert bench.index.exactness(SPACE, tokens) == (SPLICED[0] + STEP_TOKENS, 0, len(PROMPT) - SPLICED[0] - STEP_TOKENS)
    bench.heal(num_spliced=10_000)
    bench.run()
    assert bench.index.exactness(SPACE, tokens) == (len(PROMPT), 0, 0)
    report = bench.healer.report()
    assert (report.num_healed, report.num_waiting) == (len(PROMPT) - SPLICED[0], 0)
    assert bench.tree.num_locks == 0


def test_pages_are_healed_whole() -> None:
    """Where paths part in a page, or one ends, nothing is known of its rows."""
    bench = Bench(page_size=16, heal_ratio=100)
    bench.heal(num_spliced=10_000)
    bench.run()
    assert bench.index.exactness(SPACE, as_tokens(PROMPT)) == (len(PROMPT), 0, 0)


def test_of_a_session_only_the_last_prompt_waits() -> None:
    bench = Bench(heal_ratio=100)
    bench.heal(num_tokens=500)
    bench.heal(num_tokens=600)
    assert bench.healer.report().num_waiting == 1


@pytest.mark.parametrize("moment", ["flush", "weights", "eviction", "suspension", "fault"])
def test_what_ends_it(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(repair_tokens=1024, heal_ratio=100)
    bench.repair()
    bench.run(1, idle=False)
    written = bench.written
    expected = HealEnd.FLUSHED
    if moment == "flush":
        bench.healer.abandon()
    elif moment == "weights":
        bench.healer.renew()
    elif moment == "eviction":
        bench.tree.donors, expected = bench.tree.donors[:400], HealEnd.EVICTED
        bench.tree.match_prefix = lambda _: SimpleNamespace(last_device_node=400, device_prefix_len=400)
    elif moment == "suspension":
        monkeypatch.setattr(bench.tree.auditor, "serves", lambda _: False)
        expected = HealEnd.SUSPENDED
    else:
        monkeypatch.setattr(bench.runner, "forward", lambda _: 1 / 0)
    bench.run(5)
    assert bench.written == written
    assert bench.ended == {expected.value: 1}
    assert not bench.healer.has_work
    assert len(bench.tree.recovered) == (moment == "fault")
    assert bench.tree.num_locks == 0


@pytest.mark.parametrize("moment", ["admitted", "published"])
def test_a_fault_costs_no_request_anything(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(repair_tokens=1024, heal_ratio=100)
    monkeypatch.setattr("sglang_pic.adapter.heal.healer.tokens_of", lambda *_: 1 / 0)
    bench.heal() if moment == "admitted" else bench.repair()
    ((_, reason, error),) = bench.tree.recovered
    assert (reason, type(error)) == (Fallback.FAULT_RENEWAL, ZeroDivisionError)
    assert not bench.healer.has_work


def test_one_worker_steps_in_a_round_and_none_before_the_last_pass_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that arrives waits for one pass."""
    hooks = hooks_of(monkeypatch, between_rounds)
    bench, stepped = Bench(repair_tokens=1024), []
    other: Any = SimpleNamespace(has_work=True, step_if_due=lambda _: stepped.append("due"))
    other.step_if_idle = lambda _: stepped.append("idle")
    between_rounds.install([])
    assert not hooks, "a server without workers has no hooks"
    between_rounds.install([bench.healer, other])
    after_pass, at_idle = hooks["after Scheduler.process_batch_result"], hooks["before Scheduler.on_idle"]
    bench.repair()
    waited: list[bool] = []
    monkeypatch.setattr(torch.cpu.Event, "synchronize", lambda _: waited.append(True), raising=False)
    after_pass(None, bench.scheduler)
    assert (bench.runner.num_steps, stepped, waited) == (1, [], [])
    after_pass(None, bench.scheduler)
    assert (bench.runner.num_steps, stepped, waited) == (2, [], [True])
    at_idle(bench.scheduler)
    assert (bench.runner.num_steps, stepped, waited) == (2, [], [True, True])
    for _ in range(4):
        at_idle(bench.scheduler)
    assert (bench.runner.num_steps, stepped[-1]) == (3, "idle")
