"""Exceptions of ours while requests are served: computed in full, counted, logged once, and every lock is back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_pic.adapter.features.pins import Pins
from sglang_pic.adapter.namespace import tree_key
from sglang_pic.adapter.serve import forward
from sglang_pic.adapter.serve import receive as reception
from sglang_pic.adapter.serve.account import FALLBACKS, TOKENS, UNDONE, Accounting
from sglang_pic.adapter.serve.admission import Admission
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.faults import SWITCHED_OFF, Faults
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.gap_batch import GapBatch
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.serve.receive import receive
from sglang_pic.adapter.serve.rows import TreeRows
from sglang_pic.adapter.serve.state import Epoch, RequestState
from sglang_pic.config import PicConfig
from sglang_pic.core import ContentIndex, CoreConfig, Plan
from sglang_pic.runtime.splice import Splicer
from tests.helpers.admitting import adder
from tests.helpers.builders import (
    Broken,
    Kept,
    fail,
    hooks_of,
    make_planning,
    make_stations,
    make_tree,
    request,
    scheduled,
    splice,
)
from tests.helpers.draft_pair import END, Pair, half
from tests.helpers.pinned import Server, text

LIMIT = 3
TEXT = text(7, 600)
PROMPT = [*text(8, 40), *TEXT]
REUSED = len(TEXT) - 32 - 1
"""What of it is spliced: neither the rows that stood in the attention sink nor the last token."""
_CORE = CoreConfig(tail_tokens=0, seam_tokens=0, min_spliced_tokens=8, max_field_tokens=0)


class Rank(Server):
    """One scheduler rank's part of ours over SGLang's tree, with the rows of `TEXT` published."""

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.index, config = Kept(), ContentIndex(_CORE), PicConfig(core=_CORE)
        self.faults = Faults(LIMIT, self.counted)
        ours = {"faults": self.faults, "accounting": Accounting(self.counted)}
        self.stations = make_stations(self.index, config, **ours)
        self.eligibility = self.stations.eligibility
        self.pins = Pins(self.index, self.eligibility, 1024, self.series)
        self.stations.features.append(self.pins)
        self.tree = make_tree(self.allocator, stations=self.stations)
        self.admission = Admission(make_planning(self.stations), self.stations)
        self.publish(TEXT)

    def publish(self, tokens: list[int], **pic: Any) -> Any:
        """A request that is computed and handed to the tree as SGLang does it; its own rows are in the tree then."""
        req = self.receive(tokens, **pic)
        req.pic.admit(0, len(tokens), first_chunk=True)
        self.tree.checkpoint_into_tree(req, up_to=len(tokens))
        self.end(req)
        self.tree.flush_pending_backups()
        return req

    def receive(self, tokens: list[int], **pic: Any) -> Any:
        """A new request, whose rows are in the tree and locked, as `Server.start` has it."""
        req = request(tokens, pic)
        receive(req, Features(), _CORE, Modes(), epoch=Epoch(restarts=self.faults.num_restarts))
        started = self.start(tokens, key=req.extra_key)
        (at,) = (i for i, (running, _) in enumerate(self.running) if running is started)
        self.running[at] = (req, self.running[at][1])
        return req

    def admit(self, req: Any, budget: int | None = None) -> None:
        """Plan and admit a request as the scheduler does in one round."""
        made = adder(budget, self.tree, self.admission)
        made._plan(req)
        made._cut(req, budget, page_size=1)
        made._settle(req, first_chunk=True)

    def num_protected(self) -> int:
        return int(self.tree.protected_size())


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    def checkpoint(tree: Any, req: Any, *, up_to: int) -> None:
        # What is published is what the tree adopted: here all of it.
        tree._inserted.append((SimpleNamespace(prefix_len=0, adopted_ranges=None), up_to))

    monkeypatch.setattr(UnifiedRadixCache, "checkpoint_into_tree", checkpoint)
    return Rank()


@pytest.mark.parametrize(
    ("owner", "name", "reason", "chunk"),
    [
        (ContentIndex, "plan", Fallback.FAULT_PLAN, 0),
        (TreeRows, "_find", Fallback.FAULT_RESOLVE, 0),
        (TreeRows, "_pieces", Fallback.FAULT_RESOLVE, 0),
        (Plan, "cut", Fallback.FAULT_PLAN, 0),
        (Plan, "clip", Fallback.FAULT_PLAN, 0),
        (Accounting, "_count_context", Fallback.FAULT_ACCOUNTING, REUSED),
    ],
)
def test_a_fault_before_the_pass_gives_the_plan_up_and_every_lock_back(
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
    reason: Fallback,
    chunk: int,
) -> None:
    healthy = rank.receive(PROMPT)
    rank.admit(healthy, 100)
    assert healthy.pic.counts.chunk_hit == healthy.cached_tokens == REUSED
    rank.end(healthy)
    before = Counter(rank.counted.counts)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        req = rank.receive(PROMPT)
        locked = rank.num_protected()
        rank.admit(req, 100)
    assert (req.pic.pending, req.pic.spliced, req.pic.counts.chunk_hit, req.cached_tokens) == (None, [], 0, 0)
    assert rank.num_protected() == locked, "the donors are unlocked"
    assert rank.counted.by_label(FALLBACKS) == {reason.value: 1}
    rise = rank.counted.counts - before
    assert rise[TOKENS.name, "chunk"] == rise[UNDONE.name, None] == chunk
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert reason.value in record.getMessage()
    assert isinstance(record.exc_info[1], Exception) if record.exc_info else False
    rank.admission.planning.plan(req, rank.tree, max_gaps=64)
    assert req.pic.pending is None, "what is left of the request is not tried again"
    rank.end(req)
    after = rank.receive(PROMPT)
    rank.admit(after, 100)
    assert after.pic.counts.chunk_hit == REUSED, "others are spliced"
    rank.end(after)
    assert rank.num_protected() == 0


def test_after_the_limit_nothing_is_planned_or_published_until_a_flush(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank.publish(PROMPT, pin="a")
    assert rank.names == ["a"]
    with monkeypatch.context() as patch:
        patch.setattr(ContentIndex, "plan", fail)
        for number in range(LIMIT):
            assert not rank.faults.is_off
            req = rank.receive(PROMPT)
            rank.admit(req, 100)
            rank.end(req)
            assert rank.faults.report().num_faults == number + 1
    assert rank.faults.is_off
    assert rank.counted.level(SWITCHED_OFF) == 1
    rank.index.settle()
    assert (rank.names, rank.num_protected(), len(rank.index._ages)) == ([], 0, 0), "nothing is kept for nothing"
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING], "each is logged once"
    req = rank.publish([*PROMPT, 3])
    assert rank.eligibility.refusal(req) is Fallback.FAULTS
    rank.index.settle()
    assert len(rank.index._ages) == 0
    rank.tree.reset()
    assert (rank.faults.is_off, rank.counted.level(SWITCHED_OFF)) == (False, 0)
    assert rank.faults.report().by_reason == {"fault_plan": LIMIT}


def test_a_publication_that_fails_leaves_no_rows_of_unknown_history(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of a request's rows were spliced was not noted: they must never be donors, nor what is computed behind."""
    with monkeypatch.context() as patch:
        patch.setattr("sglang_pic.core.index.ContentIndex._add_donors", fail)
        old = rank.receive([*text(9, 64), *TEXT])
        rank.publish(text(10, 100))
        assert rank.counted.by_label(FALLBACKS) == {"fault_publication": 1}
    assert rank.index.is_whole
    rank.index.settle()
    assert len(rank.index._ages) == 0
    assert rank.eligibility.refusal(old) is Fallback.FAULTS, "it may have rows from before in its prefix"
    rank.end(old)
    new = rank.publish(TEXT)
    assert new.extra_key == tree_key(None, restarts=1)
    rank.receive(PROMPT)
    req = rank.running[-1][0]
    rank.admit(req, 100)
    assert req.pic.counts.chunk_hit == REUSED, "what is published from here on is spliced"
    rank.end(req)


def test_a_change_of_the_index_that_was_left_half_done_costs_the_index(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a donor are gone, and dropping it from the index fails in the middle of a plan."""
    rank.evict_all()
    with monkeypatch.context() as patch:
        patch.setattr("sglang_pic.core.trie.Trie.remove", fail)
        req = rank.receive(PROMPT)
        rank.admit(req, 100)
    assert rank.counted.by_label(FALLBACKS) == {"fault_plan": 1}
    rank.index.settle()
    assert (rank.index.is_whole, len(rank.index._ages), rank.faults.num_restarts) == (True, 0, 1)
    rank.end(req)


@pytest.mark.parametrize(
    "broken", ["_describe", "_SortedPrompts.add", "_SortedPrompts.remove", "ContentIndex.pin", "ContentIndex.unpin"]
)
def test_a_pin_that_fails_gives_every_pin_back(rank: Rank, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    rank.publish(PROMPT, pin="a")
    rank.publish(text(11, 100), pin="b")
    assert rank.names == ["a", "b"]
    with monkeypatch.context() as patch:
        patch.setattr(f"sglang_pic.adapter.features.pins.{broken}", fail)
        rank.publish([*PROMPT, 4], pin="a")
    assert rank.counted.by_label(FALLBACKS) == {"fault_pins": 1}
    assert (rank.names, rank.pins.num_tokens, rank.num_protected()) == ([], 0, 0)
    rank.check()


def test_a_request_whose_reception_fails_is_served_apart(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = hooks_of(monkeypatch, reception)
    reception.install(rank.tree, rank.admission, _CORE)
    monkeypatch.setattr(reception, "parse_options", fail)
    req = request(extra_key="tenant", cache_salt="salt")
    hooked["after Req.__init__"](None, req)
    state: RequestState = req.pic
    assert state.options.mode is Mode.OFF
    assert (req.extra_key, state.namespace.extra_key) == (tree_key("tenant", lane="off"), "tenant")
    assert rank.counted.by_label(FALLBACKS) == {"fault_options": 1}


def test_what_cannot_be_recovered_from_is_raised() -> None:
    faults = Faults(LIMIT)
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    for error in (lost, _caused_by(lost)):
        with pytest.raises(type(error)):
            faults.note(Fallback.FAULT_PLAN, error)
    ranks: Any = SimpleNamespace(check=lambda _: None)
    with pytest.raises(Broken):
        Faults(LIMIT, None, ranks).note(Fallback.FAULT_GAPS, Broken(), in_pass=True)
    assert faults.report().num_faults == 0


def _caused_by(error: Exception) -> Exception:
    raised = Broken()
    raised.__cause__ = error
    return raised


STAGES: dict[str, tuple[Callable[[Pair, pytest.MonkeyPatch], object], Fallback]] = {
    "splice": (lambda _, patch: patch.setattr(Splicer, "splice", fail), Fallback.FAULT_SPLICE),
    "choose": (lambda _, patch: patch.setattr(forward, "replays_gaps", fail), Fallback.FAULT_GAPS),
    "narrow": (lambda _, patch: patch.setattr(GapBatch, "_narrow_fields", fail), Fallback.FAULT_GAPS),
    "bind": (lambda made, patch: patch.setattr(made.target.kv_index_translator, "own_plan", fail), Fallback.FAULT_GAPS),
    "pass": (lambda made, patch: patch.setattr(made.target, "compute", half(made.target.compute)), Fallback.FAULT_GAPS),
}


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_the_forward_pass_computes_the_batch_whole(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    made = Pair(num_heads=0)
    arm, reason = STAGES[stage]
    assert made.spliced(lambda: arm(made, monkeypatch)) == [0, 0], "every row is that of a full prefill"
    ((_, noted, error, is_admitted, was_in_pass),) = made.noted
    assert (noted, is_admitted, was_in_pass) == (reason, True, stage == "pass")
    assert isinstance(error, Broken)
    assert made.released == ["donors"]
    assert made.path._running is None


@pytest.mark.usefixtures("no_groups")
def test_a_layout_that_fails_gives_the_donors_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made, moved, batch = Pair(num_heads=0), splice(0, END, (10, 20, 4)), SimpleNamespace()
    moved.locks.callback(made.released.append, "donors")
    req = request()
    req.pic.pending = moved
    monkeypatch.setattr(made.path, "lay_out", fail)
    made.path._prepare(batch, object, scheduled([req], [END]), None)  # type: ignore[arg-type]
    assert (vars(batch), made.released, req.pic.pending) == ({}, ["donors"], None)
    assert [note[:2] for note in made.noted] == [([req], Fallback.FAULT_GAPS)]


@pytest.mark.usefixtures("no_groups")
def test_a_fault_while_the_server_starts_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pair(num_heads=0)
    monkeypatch.setattr(forward.Pass, "is_trial", True)
    with pytest.raises(Broken):
        made.spliced(lambda: monkeypatch.setattr(Splicer, "splice", fail))
    assert made.released == ["donors"]
