"""Where prompts go: the index of what servers hold against plain sets, and the policy's account."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import ContentIndex
from sglang_pic.route.index import FleetIndex
from sglang_pic.route.policy import Balancer, Route
from sglang_pic.route.sketch import SAMPLE_EVERY, Sketched, cut, salted

_SERVERS = st.sampled_from(["a", "b", 3])
_NAMED = st.tuples(st.sampled_from(["add", "remove"]), _SERVERS, st.lists(st.integers(0, 60), max_size=40))
_CHANGES = st.lists(_NAMED | st.tuples(st.just("forget"), _SERVERS, st.just(None)), max_size=30)


@given(changes=_CHANGES, spread=st.sampled_from([1, 0x9E3779B97F4A7C15]))
def test_the_index_is_a_set_of_names_for_each_server(changes: list[Any], spread: int) -> None:
    index = FleetIndex()
    model: dict[Any, set[int]] = {}
    for change, server, numbers in changes:
        names = {max(1, number * spread % (1 << 64)) for number in numbers or ()}
        if change == "forget":
            index.forget(server)
            model.pop(server, None)
        else:
            getattr(index, change)(server, list(names))
            held = model.setdefault(server, set())
            held |= names if change == "add" else set()
            held -= names if change == "remove" else set()
    assert len(index) == len(set().union(*model.values()))
    for server, names in model.items():
        assert index.num_names(server) == len(names)
    every = sorted({max(1, number * spread % (1 << 64)) for number in range(61)})
    for name in every:
        held = index.held(_sketched([name]))
        assert held == {server: 100 for server, names in model.items() if name in names}
    for server in list(model):
        index.forget(server)
    assert len(index) == 0
    assert len(index._numbers) == 1, "sets that no name has are dropped"


def test_a_server_is_thought_to_compute_the_tail_and_half_of_what_stands_behind_a_difference() -> None:
    index = FleetIndex()
    for server, names in {"all": range(1, 21), "moved": range(2, 21), "tail": [19, 20], "short": [3]}.items():
        index.add(server, list(names))
    half = (2000 - 256 - 100 - 32) // 2
    assert index.held(_sketched(list(range(1, 21)))) == {"all": 2000, "moved": half, "short": (100 - 32) // 2}


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
    return Sketched(np.array(names, dtype=np.uint64), ends, len(names) * length)


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


@given(
    prompts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), min_size=1, max_size=60),
    dies=st.integers(0, 59),
)
def test_what_is_outstanding_is_that_of_open_requests(prompts: list[tuple[int, int, bool]], dies: int) -> None:
    balancer = Balancer(FleetIndex())
    for server in range(3):
        balancer.join(server)
    routes: list[Route] = []
    for number, (first, length, ends) in enumerate(prompts):
        if number == dies:
            balancer.leave(0)
            routes = [route for route in routes if route.server != 0]
        route = balancer.route(_sketched(list(range(first + 1, first + 1 + length))))
        assert route.server in balancer.servers
        routes.append(route)
        if ends:
            balancer.end(routes.pop(0), 5)
    for server in balancer.servers:
        assert balancer.outstanding(server) == sum(each.num_computed for each in routes if each.server == server)
