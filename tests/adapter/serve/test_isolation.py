"""What clients put into `extra_key` and `cache_salt` never makes one namespace of two, and nothing crosses them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.events import LoRANameTable

from sglang_pic.adapter.features.pins import _describe
from sglang_pic.adapter.namespace import KEY_MARK, Namespace, is_strict, tree_key
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature, Features
from sglang_pic.adapter.serve.frontend import _validate
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.planning import donor_namespaces
from sglang_pic.adapter.serve.receive import receive, serve_as_opted_out
from sglang_pic.adapter.serve.state import Epoch, RequestState, tree_namespace
from sglang_pic.core import DropReason
from sglang_pic.errors import ConfigError
from tests.conftest import ROOT
from tests.helpers.builders import Server, make_planning, make_stations, request

TEXT = [7 * i % 997 + 1 for i in range(300)]
LANES = (None, "off", "in_place", "recompile")
KEYS = (
    st.none() | st.text(max_size=6) | st.sampled_from(["pic:off", "\x1f", "pic:1\x1fa", "a\x1fpic", "off", "recompile"])
)


def is_let_through(extra_key: str | None, cache_salt: str | None) -> bool:
    """Whether the front end takes a request."""
    manager = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend="pic"))
    try:
        _validate(manager, SimpleNamespace(sampling_params={}, extra_key=extra_key, cache_salt=cache_salt))
    except ConfigError:
        return False
    return True


def without_marks(key: str) -> str:
    """A key of the tree without the marks that begin it."""
    while key.startswith(KEY_MARK):
        key = key.removeprefix(KEY_MARK).partition("\x1f")[2]
    return key


def options(lane: str | None) -> dict[str, str]:
    return {} if lane is None else {"mode": "off"} if lane == "off" else {"edit": lane}


@given(st.lists(st.tuples(KEYS, KEYS, st.sampled_from(LANES)), min_size=2, max_size=6))
def test_keys_of_requests_are_equal_only_where_their_namespaces_and_lanes_are(
    asked: list[tuple[str | None, str | None, str | None]],
) -> None:
    """The marks of lanes are put into a text that clients write: nothing that is let through may look like one."""
    server = Server()
    keys: dict[Namespace, tuple[str, str | None, str | None]] = {}
    for extra_key, salt, lane in asked:
        if not is_let_through(extra_key, salt):
            assert extra_key is not None
            assert KEY_MARK in extra_key
            continue
        req = server.receive(TEXT, options(lane), extra_key=extra_key, cache_salt=salt)
        # An empty key is none; SGLang makes None of it for both fields.
        wanted = extra_key or "", salt, lane
        assert keys.setdefault(tree_namespace(req)._replace(extra_key=req.extra_key or ""), wanted) == wanted
        for donor in donor_namespaces(req):
            assert donor.cache_salt == salt
            assert without_marks(donor.extra_key or "") == (extra_key or "")


def test_a_key_that_looks_like_ours_is_refused_and_changes_nothing() -> None:
    for key in (KEY_MARK, tree_key("a", lane="off"), f"a{KEY_MARK}1"):
        assert not is_let_through(key, None)
        # Another front end may let it through: served exactly, in nobody's namespace.
        for lora_id in (None, "l"):
            server = Server()
            adapted = f"{key}{lora_id or ''}"
            req = server.receive(TEXT, extra_key=adapted, lora_id=lora_id)
            others = [
                server.receive(TEXT, options(lane), extra_key=other, lora_id=adapter).extra_key
                for lane in LANES
                for other, adapter in (("a", None), ("al", "l"), (None, None), ("l", "l"))
            ]
            assert is_strict(req.extra_key)
            assert req.extra_key not in others
            assert req.extra_key == server.receive(TEXT, extra_key=adapted, lora_id=lora_id).extra_key
            serve_as_opted_out(late := request(TEXT, extra_key=adapted, lora_id=lora_id))
            assert late.extra_key == req.extra_key
    # Salts stand beside the key and are never searched for marks.
    server = Server()
    server.serve([*range(20_000, 20_040), *TEXT], extra_key="a")
    assert server.serve([*range(21_000, 21_040), *TEXT], extra_key="a", cache_salt=f"{KEY_MARK}off") == 0
    assert server.serve([*range(22_000, 22_040), *TEXT], extra_key="a") > 200


def test_an_adapters_rows_serve_it_and_nobody_else() -> None:
    """SGLang makes the adapter's id a part of the key; who sends the id of an adapter as a key is not the adapter."""
    server = Server()
    adapted = {"extra_key": "l", "lora_id": "l"}
    for theirs in ({"extra_key": "l"}, {"extra_key": "m", "lora_id": "m"}, {}):
        server.serve([*range(20_000, 20_040), *TEXT], **theirs)
    assert server.serve([*range(21_000, 21_040), *TEXT], **adapted) == 0
    assert server.serve([*range(22_000, 22_040), *TEXT], **adapted) > 200
    assert server.serve([*range(23_000, 23_040), *TEXT], {"edit": "recompile"}, **adapted) > 200, "a lane of its own"
    off = server.receive(TEXT, {"mode": "off"}, **adapted)
    assert is_strict(off.extra_key)
    assert off.extra_key != server.receive(TEXT, {"mode": "off"}, extra_key="l").extra_key


@pytest.mark.parametrize("extra_key", ["", "tenant"])
@pytest.mark.parametrize("marks", [{}, {"lane": "off"}, {"lane": "notes", "generation": 2, "restarts": 1}], ids=str)
def test_sglang_finds_the_adapter_in_a_key_of_the_tree(marks: dict[str, Any], extra_key: str) -> None:
    """Its KV events name the adapter of a block by the end of the key. A router takes a block without one for the base
    model's."""
    names = LoRANameTable.from_lora_refs([LoRARef(lora_name="theirs", lora_path="a folder")])
    (adapter,) = names._names
    key = tree_key(extra_key + adapter, adapter=adapter, **marks)
    assert names.resolve(key) == "theirs"
    assert tree_key(extra_key + adapter, **marks) != key, "an id that a client sent as its key"
    # What SGLang puts behind a key leaves the marks what they are.
    assert is_strict(f"{key}|more") == (marks == {"lane": "off"})


def test_who_is_shown_a_namespace_sees_no_marks() -> None:
    adapted = {"extra_key": "tenantl", "lora_id": "l"}
    req = Server().receive(TEXT, {"edit": "recompile"}, **adapted)
    assert req.pic.namespace == Namespace("tenantl", None, "l")
    shown = [_describe((space, "skill"), np.asarray([1])) for space in (req.pic.namespace, Namespace("tenantl"))]
    assert [pin.extra_key for pin in shown] == ["tenantl"] * 2
    assert shown[0].digest != shown[1].digest


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
