"""Where prompts go: the index of what servers hold against plain sets, and the policy's account."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import ContentIndex
from sglang_pic.route.balancer import WAITING_HALF_LIFE_S, Balancer
from sglang_pic.route.fleet_index import FleetIndex
from sglang_pic.route.sketch import SAMPLE_EVERY, Sketched, cut, salted

_SERVERS = st.sampled_from(["a", "b", "c"])
_NAMED = st.tuples(st.sampled_from(["add", "remove"]), _SERVERS, st.lists(st.integers(0, 60), max_size=40))
_CHANGES = st.lists(_NAMED | st.tuples(st.just("forget"), _SERVERS, st.just(None)), max_size=30)


@given(changes=_CHANGES)
def test_the_index_is_a_set_of_names_for_each_server(changes: list[Any]) -> None:
    index = FleetIndex()
    model: dict[Any, set[int]] = {}
    for change, server, names in changes:
        if change == "forget":
            index.forget(server)
            model.pop(server, None)
        else:
            held = model.setdefault(server, set())
            fresh = getattr(index, change)(server, names)
            assert fresh is None or set(fresh) == set(names) - held
            held |= set(names) if change == "add" else set()
            held -= set(names) if change == "remove" else set()
    assert len(index) == len(set().union(*model.values()))
    for server, names in model.items():
        assert index.num_names(server) == len(names)
    for name in range(61):
        held = index.held(_sketched([name]))
        assert held == {server: 100 for server, names in model.items() if name in names}
    for server in list(model):
        index.forget(server)
    assert len(index) == 0


def test_a_server_is_thought_to_compute_the_tail_and_half_of_what_stands_behind_a_difference() -> None:
    index = FleetIndex()
    for server, names in {"all": range(1, 21), "moved": range(2, 21), "tail": [19, 20], "short": [3]}.items():
        index.add(server, list(names))
    held = {"all": 2000, "moved": (2000 - 64 - 100 - 64) // 2, "tail": (200 - 64 - 64) // 2}
    assert index.held(_sketched(list(range(1, 21)))) == held


def test_an_index_keeps_so_many_names_of_a_server() -> None:
    index = FleetIndex(max_names_per_server=5)
    index.add("liar", range(1, 100))
    index.add("other", [1, 2, 3])
    assert (index.num_names("liar"), index.num_names("other")) == (5, 3)
    index.remove("liar", [1, 2])
    index.add("liar", [50, 51, 52])
    assert index.num_names("liar") == 5


def _sketched(names: list[int], length: int = 100) -> Sketched:
    ends: npt.NDArray[np.int64] = np.arange(1, len(names) + 1, dtype=np.int64) * length
    return Sketched(np.array(names, dtype=np.uint64), ends, max(1, len(names)) * length)


def test_equal_text_has_equal_names_within_a_namespace_and_a_salt() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 1000, 4000, dtype=np.int32)
    moved = np.concatenate([rng.integers(0, 1000, 333, dtype=np.int32), text])
    names = cut(text, b"n", b"salt").names
    assert len(names) > 4000 // (24 * SAMPLE_EVERY)
    # FastCDC is in step again after a few chunks.
    assert len(np.intersect1d(names, cut(moved, b"n", b"salt").names)) > 0.9 * len(names)
    for namespace, salt in ((b"m", b"salt"), (b"n", b"other")):
        assert not len(np.intersect1d(names, cut(text, namespace, salt).names))
    assert len(salted(range(100), b"n", b"salt")) == 100 // SAMPLE_EVERY


def test_a_prompt_is_named_as_servers_tell_it() -> None:
    """Neither by the sink nor by delimiters, which are chunks of a token."""
    text, delimiters = np.random.default_rng(1).integers(0, 200, 4000, dtype=np.int32), frozenset(range(9))
    index = ContentIndex()
    index.publish("n", text, [(0, len(text))], delimiters=delimiters)
    told = salted(index.donor_names()["n"], b"n", b"salt")
    names = cut(text, b"n", b"salt", delimiters=delimiters).names
    assert 10 < len(names) == len(np.intersect1d(names, told))


@pytest.mark.parametrize("num_lost", [0, 100])
def test_requests_whose_end_nobody_saw_send_none_elsewhere(num_lost: int) -> None:
    """Whatever was sent before a server left and came back, later requests are spread evenly."""
    balancer, now = Balancer(FleetIndex()), 0.0
    for server in "abc":
        balancer.join(server)
    for _ in range(num_lost):
        balancer.route(_sketched([], 30_000), now)
    balancer.leave("c")
    balancer.join("c")
    chosen: Counter[str] = Counter()
    for _ in range(1000):
        now += 0.01
        route = balancer.route(_sketched([], 2000), now)
        assert route is not None
        chosen[route.server] += 1
    assert max(chosen.values()) - min(chosen.values()) < 20
    assert all(0 < balancer.waiting(server, now) < 1e6 for server in "abc")
    assert all(balancer.waiting(server, now + 60 * WAITING_HALF_LIFE_S) < 1 for server in "abc"), "bookings end"
