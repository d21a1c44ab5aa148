"""Request options: every bad value is refused with a message that names it and what is allowed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sglang_pic.adapter.namespace import is_strict, tree_key
from sglang_pic.adapter.serve.options import Mode, RequestOptions, parse_options
from sglang_pic.core import CoreConfig
from sglang_pic.errors import ConfigError


@pytest.mark.parametrize("custom_params", [None, {}, {"thinking_budget": 3}, {"pic": None}, {"pic": {}}])
def test_absent_options_are_the_defaults(custom_params: object) -> None:
    assert parse_options(custom_params) == RequestOptions(mode=Mode.AUTO, overrides={})


def test_options_are_read() -> None:
    assert parse_options({"pic": {"mode": "off"}}).mode is Mode.OFF
    server = CoreConfig(sink_tokens=7, tail_tokens=100)
    assert parse_options({"pic": {}}).policy(server) is server
    assert parse_options({"pic": {"seam_tokens": 8}}).policy(server) == replace(server, seam_tokens=8)
    assert parse_options({"pic": {"tail_tokens": 64}}).policy(server) == replace(server, tail_tokens=64)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("off", "'off'"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"mode": ["auto"]}, "mode=['auto']"),
        ({"seam_tokens": -1}, "seam_tokens=-1"),
        ({"seam_tokens": 10**9}, "seam_tokens=1000000000"),
        ({"seam_tokens": True}, "seam_tokens=True"),
        ({"seam_tokens": 1.5}, "seam_tokens=1.5"),
        ({"tail_tokens": -1}, "tail_tokens=-1"),
        ({"seams": 1}, "'seams'"),
    ],
)
def test_bad_options_are_named(options: object, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({"pic": options})
    assert named in str(caught.value)
    assert "must be" in str(caught.value) or "allowed" in str(caught.value)


def test_keys_of_the_tree_keep_requests_apart() -> None:
    for key in (None, "", "a"):
        assert tree_key(key, strict=False, generation=0) == key
    keys = [
        tree_key(key, strict=strict, generation=generation)
        for key in (None, "a", "b")
        for strict, generation in ((False, 0), (False, 1), (False, 2), (True, 0))
    ]
    assert len(set(keys)) == len(keys)
    assert [is_strict(key) for key in keys] == [False, False, False, True] * 3
    assert tree_key("a", strict=True, generation=3) == tree_key("a", strict=True, generation=0)


def test_experiments_are_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match="unknown key 'testing'"):
        parse_options({"pic": {"testing": {}}})
