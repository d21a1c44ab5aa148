"""Pins over SGLang's own tree and allocator: what is held, what is given back, and that every slot is accounted for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_pic.adapter.features import pins
from sglang_pic.adapter.features.pins import PIN_BYTES, PinEnd
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.planning import Limits
from sglang_pic.core import Path, as_tokens
from tests.helpers.admitting import adder
from tests.helpers.builders import request
from tests.helpers.pinned import MAX_PINNED, POOL, Server, text
from tests.helpers.rank_driver import Rank


@pytest.fixture(params=[1, 16])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    yield made
    made.check()


SYSTEM = text(1, 160)
A, B, C = ([*SYSTEM, *text(seed, 320)] for seed in (2, 3, 4))


def test_a_pinned_prompt_survives_what_evicts_everything_else(server: Server) -> None:
    server.serve(A, pin="a")
    server.serve(B)
    server.serve([*A, *text(9, 64)])
    server.evict_all()
    assert server.resident([*A, *text(9, 64)]) == len(A)
    assert server.resident(B) == len(SYSTEM)
    assert server.pins.num_tokens == len(A)
    server.serve(text(5, 32), unpin="a")
    server.evict_all()
    assert (server.resident(A), server.names, server.ended) == (0, [], {"dropped": 1})


def test_the_same_name_again_replaces_the_older_pin(server: Server) -> None:
    server.serve(A, pin="a")
    server.serve(B, pin="b")
    digest = server.pins.report().held[0].digest
    server.serve(C, pin="a")
    assert server.names == ["b", "a"], "it is the youngest then"
    assert server.pins.report().held[1].digest != digest
    server.evict_all()
    assert (server.resident(A), server.resident(C)) == (len(SYSTEM), len(C))
    assert server.ended == {"replaced": 1}


def test_beyond_the_share_of_the_pool_the_oldest_go_and_a_prompt_that_is_too_long_is_refused(server: Server) -> None:
    for name in "abc":
        server.serve(text(ord(name), 320), pin=name)
    server.serve(text(20, 96), pin="d")
    assert server.names == ["b", "c", "d"]
    server.serve(text(21, MAX_PINNED + 16), pin="e")
    server.serve(text(22, server.page_size - 1), pin="f")
    assert server.names == ["b", "c", "d"]
    assert server.ended == {"limit": 1, "refused": 2}
    server.serve(text(23, MAX_PINNED), pin="b")
    assert server.names == ["b"]


def test_a_pin_ends_with_the_first_request_after_its_time(server: Server) -> None:
    server.serve(A, pin="a", pin_ttl_s=60)
    server.serve(B, pin="b")
    server.clock = 59.0
    server.serve(text(5, 32))
    assert server.names == ["a", "b"]
    server.serve(A, pin="a", pin_ttl_s=60)
    server.clock = 118.0
    server.serve(text(6, 32))
    assert server.names == ["b", "a"], "pinned again, it lives from then on"
    server.clock = 119.0
    server.serve(text(7, 32))
    assert (server.names, server.ended) == (["b"], {"replaced": 1, "expired": 1})
    server.evict_all()
    assert (server.resident(A), server.resident(B)) == (len(SYSTEM), len(B))


def test_the_lowest_priority_goes_first(server: Server) -> None:
    """Beyond the share of the pool and if memory is short, whatever is older."""
    for name, prompt, priority in (("firm", A, 100), ("low", B, 1), ("retained", C, 50)):
        server.serve(prompt, pin=name, pin_priority=priority)
    assert (server.names, server.ended) == (["retained", "firm"], {"limit": 1})
    assert server.pins.give_back_oldest(server.tree, PinEnd.MEMORY)
    assert server.names == ["firm"]
    assert server.pins.give_back_oldest(server.tree, PinEnd.MEMORY)
    assert not server.pins.give_back_oldest(server.tree, PinEnd.MEMORY)


def test_many_names_of_one_prompt_are_bounded_by_their_host_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share their slots, but each has a lock and a copy of the tokens."""
    monkeypatch.setattr(pins, "MAX_BYTES", 4 * (PIN_BYTES + 4 * len(A)))
    for name in "abcdef":
        server.serve(A, pin=name)
    assert (server.names, server.ended) == ([*"cdef"], {"limit": 2})
    server.serve(B, pin="g", unpin="d")
    assert server.names == [*"cefg"]


def test_nothing_crosses_a_namespace(server: Server) -> None:
    a, b = A[:240], B[:240]
    server.serve(a, pin="a")
    server.serve(b, pin="a", key="tenant")
    server.serve(b, pin="a", salt="secret")
    server.serve(SYSTEM, unpin="a", key="other")
    held = server.pins.report().held
    assert [(pin.extra_key, pin.has_salt) for pin in held] == [(None, False), ("tenant", False), (None, True)]
    assert held[1].digest != held[2].digest, "who does not know the salt cannot tell what is pinned"
    assert "secret" not in repr(server.pins.report())
    lens = ((None, None, len(SYSTEM)), ("tenant", None, len(b)), (None, "secret", len(b)), ("x", None, 0))
    for key, salt, pinned in lens:
        path = Path(Namespace(key, salt), [as_tokens([*b, 7])])
        assert server.pins.num_pinned(path) == pinned
    server.serve(SYSTEM, unpin="a")
    assert server.pins.num_pinned(Path(Namespace(), [as_tokens(b)])) == 0
    assert len(server.names) == 2


def test_an_allocation_gets_the_slots_of_the_oldest_pins_and_no_more(server: Server) -> None:
    server.serve(A, pin="a")
    server.serve(B, pin="b")
    server.start(text(6, POOL - len(SYSTEM) - 640 + 16))
    assert (server.names, server.ended) == (["b"], {"memory": 1})
    assert server.resident(B) == len(B)
    server.start(text(7, 320))
    assert server.names == []


def test_a_flush_forgets_pins_without_unlocking_and_new_weights_unlock_them(server: Server) -> None:
    server.serve(A, pin="a")
    server.serve(B, pin="b")
    while server.pins.give_back_oldest(server.tree, PinEnd.WEIGHTS):
        pass
    server.evict_all()
    assert (server.resident(A), server.names) == (0, [])
    server.serve(A, pin="a")
    server.tree.reset()
    server.allocator.clear()
    assert (server.names, server.ended) == ([], {"weights": 2, "flushed": 1})
    server.serve(A, pin="a")
    assert server.names == ["a"]


def test_rows_of_other_weights_are_not_pinned(server: Server) -> None:
    """SGLang may keep them as prefixes, but they are no donors."""
    req = server.start(A, pin="a")
    server.tree.change_weights()
    server.end(req)
    assert (server.names, server.ended) == ([], {"weights": 1})


@pytest.mark.parametrize(("num_running", "admitted"), [(0, True), (1, False)])
def test_a_request_that_would_wait_for_ever_gets_the_slots_of_pins(
    monkeypatch: pytest.MonkeyPatch, num_running: int, admitted: bool
) -> None:
    """While others run it waits for them; on an idle server nobody else would ever leave it slots."""
    server = Server(max_pinned=POOL)
    for name in "abc":
        server.serve(text(ord(name), 1000), pin=name)
    tries: list[int] = []

    def add(_: Any, __: Any, *___: object) -> AddReqResult:
        tries.append(len(server.names))
        fits = server.allocator.available_size() + server.tree.evictable_size() > 2500
        return AddReqResult.CONTINUE if fits else AddReqResult.NO_TOKEN

    monkeypatch.setattr(PrefillAdder, "add_one_req", add)
    planning = SimpleNamespace(plan=lambda *_, **__: None, limits=Limits(64, 1 << 24))
    shared: Any = SimpleNamespace(planning=planning, stations=server.stations, next_batch_is_whole=False)
    made = adder(None, server.tree, shared, running=(request([1]),) * num_running)
    result = made.add_one_req(request([1]), False, None)
    assert (result is AddReqResult.CONTINUE) == admitted
    assert (tries, server.names) == (([3, 2, 1], ["c"]) if admitted else ([3], ["a", "b", "c"]))
    server.check()


@pytest.mark.parametrize("lookahead", [0, 1], ids=["plain", "draft"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_five_hundred_pins_and_drops_among_aborts_flushes_and_retractions(page_size: int, lookahead: int) -> None:
    """Every slot is accounted for after each step, no allocation fails, and a second rank ends up with the same."""
    ranks = [Server(page_size, max_pinned=POOL // 2, lookahead=lookahead) for _ in range(2)]
    rng = random.Random(page_size)
    num_pinned = 0
    while num_pinned < 500:
        step = _random_step(rng)
        num_pinned += step.__name__ in ("pin", "drop")
        for rank in ranks:
            step(rank)
            rank.check()
    assert {"dropped", "flushed", "limit", "memory", "refused", "replaced"} <= set(ranks[0].ended)
    assert ranks[0].pins.report() == ranks[1].pins.report()
    assert ranks[0].ended == ranks[1].ended
    for rank in ranks:
        while rank.running:
            rank.end(rank.running[0][0])
        while rank.pins.give_back_oldest(rank.tree, PinEnd.DROPPED):
            pass
        rank.check()
        rank.evict_all()
        assert rank.allocator.available_size() == POOL
        rank.tree.sanity_check()


def _random_step(rng: random.Random) -> Callable[[Server], None]:
    """What happens next, the same on every rank."""
    name, other = (f"skill-{rng.randrange(24)}" for _ in range(2))
    key = rng.choice([None, None, "tenant"])
    tokens = [*text(rng.randrange(3), 80), *text(rng.randrange(60), rng.randrange(10, 300))]
    chance, pick = rng.random(), rng.random()

    def pin(server: Server) -> None:
        server.serve(tokens, key=key, pin=name)

    def drop(server: Server) -> None:
        server.serve(tokens, key=key, unpin=name, pin=other if pick < 0.2 else None)

    def refuse(server: Server) -> None:
        server.refusal = Fallback.HIDDEN_STATES
        server.serve(tokens, key=key, pin=name)
        server.refusal = None

    def start(server: Server) -> None:
        # What runs fits into the pool if pins give way, and one more request beside it.
        if len(server.running) < 5:
            server.start([*tokens, *text(int(1000 * pick), 300)], key=key, pin=name if pick < 0.5 else None)

    def end(server: Server) -> None:
        if server.running:
            req = server.running[int(pick * len(server.running))][0]
            how: dict[str, Any] = ({}, {"reason": FINISH_ABORT()}, {"checkpointed": False})[int(3 * chance * 100) % 3]
            server.end(req, **how)

    def flush(server: Server) -> None:
        if not server.running:
            server.tree.reset()
            server.allocator.clear()

    steps = (pin, pin, pin, pin, drop, refuse, start, start, start, end, end, end, flush)
    return steps[int(chance * len(steps))]


def test_pins_keep_windows_until_their_pool_needs_them() -> None:
    """All of a prompt's window rows: a lock of SGLang's keeps the last window only."""
    rank = Rank(16, shuffle=0, num_windows=2048)
    for number, pic in enumerate(({"pin": "held"}, {})):
        rank.start([*range(3 + 20 * number, 3 + 20 * number + 600)], pic, 0)
        rank.end(rank.running[0], checkpointed=True)
    assert rank.tree.swa_protected_size() >= 592
    # Everything in the window pool, of which the other one has plenty.
    evict_from_tree_cache(rank.tree, 2048)
    assert rank.allocator.swa_available_size() == 2048
    assert rank.pins.report().held == []
    rank.settle()
