"""Request options: every bad value is refused with a message that names it and what is allowed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sglang_pic.adapter.serve.options import STRICT_MARK, Mode, RequestOptions, parse_options, strict_key
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


def test_strict_keys_keep_tenants_apart() -> None:
    assert strict_key(None) == STRICT_MARK
    assert strict_key("a") != strict_key("b") != strict_key(None)


def test_experiments_are_refused_unless_the_server_is_under_test() -> None:
    options = {"pic": {"testing": {"rotate": False}}}
    with pytest.raises(ConfigError, match="server under test"):
        parse_options(options)
    assert parse_options(options, allow_testing=True).testing.rotate is False
    assert parse_options({"pic": {}}, allow_testing=True).testing.rotate is True
    experiment = {"pic": {"seam_tokens": 8, "testing": {"policy": {"seam_tokens": 4, "max_misfits": 5}}}}
    assert parse_options(experiment, allow_testing=True).overrides == {"seam_tokens": 8, "max_misfits": 5}


@pytest.mark.parametrize(
    ("testing", "named"),
    [
        ({"record": "../elsewhere"}, "record='../elsewhere'"),
        ({"record": ".hidden"}, "record='.hidden'"),
        ({"turned": False}, "turned"),
        ({"rotate": 0}, "bool"),
        ({"policy": {"min_run_tokens": 0}}, "min_run_tokens=0"),
        ({"policy": {"min_run": 1}}, "min_run"),
    ],
)
def test_bad_experiments_are_named(testing: object, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({"pic": {"testing": testing}}, allow_testing=True)
    assert named in str(caught.value)
