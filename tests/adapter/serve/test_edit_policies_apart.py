"""Lanes: requests with another `edit` policy than the server's keep their rows apart, and find donors in two places."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sglang_pic.adapter.namespace import Namespace, is_strict
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature, Features
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.planning import donor_namespaces
from sglang_pic.adapter.serve.receive import receive
from sglang_pic.adapter.serve.state import Epoch, RequestState, tree_namespace
from sglang_pic.core import DropReason
from tests.conftest import ROOT
from tests.helpers.builders import Server, make_planning, make_stations

TEXT = [7 * i % 997 + 1 for i in range(300)]
IN_PLACE = {"edit": "in_place", "max_field_tokens": 128}


def behind(*beginning: int) -> list[int]:
    """The text behind a beginning of its own."""
    return [*(20_000 + 50 * b + i for b in beginning for i in range(40)), *TEXT]


def test_donors_come_from_the_namespace_and_never_from_a_lane() -> None:
    server, lane = Server(), {"edit": "recompile"}
    assert server.serve(behind(1)) == 0
    assert server.serve(behind(2), lane) > 200, "rows of the namespace serve the lane"
    assert set(server.tree.asked) == {None}
    assert server.serve([*TEXT, *behind(3)], lane, extra_key="b") == 0, "another namespace is another"
    assert server.serve(behind(3), {"edit": "in_place"}, extra_key="b") == 0, "a lane is not another lane"
    assert server.serve(behind(3), extra_key="b") == 0, "nor the namespace"
    assert server.serve(behind(4), lane, extra_key="b") > 200
    assert server.serve(behind(4), extra_key="b", cache_salt="s") == 0


def test_the_better_of_two_plans_is_taken() -> None:
    server, lane = Server(), {"edit": "recompile"}
    server.serve(behind(1)[:140])
    server.serve(behind(2), lane)
    server.tree.asked.clear()
    server.tree.collected.clear()
    own = server.receive(TEXT, lane).extra_key
    for tokens, wanted in ((behind(3)[:139], None), (behind(3), own)):
        req = server.plan(tokens, lane)
        (*_, run) = req.pic.pending.plan.runs
        assert run.donor.namespace == Namespace(wanted)
        req.pic.release_row()
    assert set(server.tree.asked) == {None, own}
    assert len(server.tree.asked) == 3
    assert len(server.tree.collected) == 2, "slots are collected on the device: of donors that are taken, no others"


@pytest.mark.parametrize("preset", ["careful", "balanced"])
def test_a_request_on_a_bolder_server_takes_donors_of_its_own_preset_alone(preset: str) -> None:
    server, lane = Server(preset="most"), {"preset": preset, "tail_tokens": 0, "edit": "in_place"}
    server.serve(behind(1)[:140])
    assert server.serve(behind(2), lane) == 0
    assert server.serve(behind(3), {}) > 0
    assert server.serve(behind(4), lane) > 0


def test_a_namespace_that_was_switched_on_again_has_new_lanes() -> None:
    server = Server()
    feature = Feature()
    feature.on_received = lambda state: setattr(state, "epoch", Epoch(generation=2))  # type: ignore[method-assign]
    features = Features([feature])
    ordinary, req = server.receive(TEXT), server.receive(TEXT, {"edit": "recompile"})
    for each, custom_params in ((ordinary, {}), (req, {"pic": {"edit": "recompile"}})):
        each.extra_key, each.sampling_params.custom_params = "a", custom_params
        receive(each, features, server.config.core, Modes())
    assert donor_namespaces(req) == [tree_namespace(req), tree_namespace(ordinary)]
    feature.on_received = lambda state: setattr(state, "diverted", Fallback.AUDIT)  # type: ignore[method-assign]
    req.extra_key = "a"
    receive(req, features, server.config.core, Modes())
    assert is_strict(req.extra_key), "off is off for every lane"


def test_rows_behind_stale_ones_serve_no_request_that_wants_all_computed() -> None:
    """The first request splices behind a changed field; what it computes further on was computed behind stale rows.

    What another request brought into the tree does not make them clean: the tree may keep its own rows before them.
    """
    clean, more = [*range(5_000, 5_100), 1, *TEXT], list(range(9_000, 9_200))
    changed = [*clean[:100], 2, *TEXT]
    for first, adopted_from in ((clean, 0), (changed, 0), (changed, 350)):
        server = Server(**IN_PLACE)
        server.serve(clean)
        req = server.plan([*first, *more])
        state: RequestState = req.pic
        state.admit(0, len(req.origin_input_ids), first_chunk=True)
        assert state.spliced[0].generation == 0
        assert state.spliced[-1].generation == int(first is changed)
        server.publication.publish(req, len(req.origin_input_ids), adopted_from=adopted_from)
        state.release_row()
        assert state.spliced == []
        again = server.plan([*range(7_000, 7_040), *more], {"edit": "recompile"})
        assert (again.pic.pending is None) == (first is changed)
        assert (DropReason.GENERATION in again.pic.last_plan.dropped) == (first is changed)
        again.pic.release_row()


def test_a_rest_too_short_to_be_planned_is_computed_because_of_a_field_that_was_found_before() -> None:
    server = Server(edit="recompile", max_field_tokens=128)
    server.serve([*range(5_000, 5_100), 1, *TEXT])
    req = server.receive([*range(5_000, 5_100), 2, *TEXT])
    end, found = len(req.origin_input_ids), []
    for req.prefix_len in (0, end - 100, end - 20):
        server.planning.plan(req, server.tree, max_gaps=64)
        found.append(req.pic.last_plan.guarded)
    assert [spans[-1][1] for spans in found] == [end - 1] * 3
    assert found[1] == found[2] != found[0]
    req.pic.release_row()


def test_the_feature_that_contributing_shows_works() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    made: dict[str, Any] = {}
    exec(code, made)
    quota = made["Quota"](max_tokens=100)
    server = Server()
    server.stations = make_stations(server.index, server.config, features=Features([quota]))
    server.planning, refusal = make_planning(server.stations), server.stations.eligibility.refusal
    server.serve(TEXT)
    for number, is_over in ((1, False), (2, True)):
        req = server.plan([number, *TEXT])
        assert (refusal(req) is Fallback.SWITCHED) == is_over
        state: RequestState = req.pic
        state.count(state.admit(0, len(TEXT) + 1, first_chunk=True))
        quota.on_admitted(req)
        state.release_row()
    assert quota.reports()["quota"].num_spliced["None"] >= 100
    quota.on_flush()
    assert refusal(server.plan([3, *TEXT])) is None
