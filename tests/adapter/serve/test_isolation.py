"""What clients put into `extra_key` and `cache_salt` never makes one namespace of two, and nothing crosses them."""

from __future__ import annotations

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
from sglang_pic.adapter.serve.frontend import _validate
from sglang_pic.adapter.serve.planning import donor_namespaces
from sglang_pic.adapter.serve.receive import serve_as_opted_out
from sglang_pic.adapter.serve.state import tree_namespace
from sglang_pic.errors import ConfigError
from tests.helpers.builders import Server, request

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


@pytest.mark.parametrize(
    "theirs",
    [{"cache_salt": "s"}, {"extra_key": "k"}, {"extra_key": "k", "cache_salt": "s"}, {"lora_id": "l"}, {}],
    ids=["salt", "key", "both", "adapter", "none"],
)
@pytest.mark.parametrize(
    "mine",
    [{"cache_salt": "t"}, {"extra_key": "m"}, {"extra_key": "k", "cache_salt": "t"}, {"extra_key": "s"}],
    ids=["salt", "key", "half", "swapped"],
)
def test_a_namespace_is_served_as_if_it_were_alone(theirs: dict[str, str], mine: dict[str, str]) -> None:
    """Spliced tokens, work of the plans, and what the tree is asked for: all that could be seen in a time."""
    shared, alone = Server(), Server()
    for i in range(6):
        shared.serve([*range(20_000 + 50 * i, 20_040 + 50 * i), *TEXT], **theirs)
    work_before = shared.index.stats().num_work
    for i in range(4):
        prompt = [*range(30_000 + 50 * i, 30_040 + 50 * i), *TEXT]
        shared.tree.asked.clear()
        alone.tree.asked.clear()
        spliced = [server.serve(prompt, **mine) for server in (shared, alone)]
        assert spliced[0] == spliced[1]
        assert (spliced[0] > 200) == (i > 0), "nothing of theirs, and its own"
        assert shared.tree.asked == alone.tree.asked
    assert shared.index.stats().num_work - work_before == alone.index.stats().num_work


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
