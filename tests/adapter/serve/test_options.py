"""Request options, and those of experiments: every bad value is refused by its name, with what is allowed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from pic_bench.probe_plugin.options import ProbedOptions, RequestProbe, parse_probed
from starlette.datastructures import Headers

from sglang_pic.adapter.namespace import OFF_LANE, is_strict, tree_key
from sglang_pic.adapter.serve import headers as headers_of
from sglang_pic.adapter.serve.options import Mode, RequestOptions, Skills, parse_options
from sglang_pic.client import NEAR
from sglang_pic.core import MOST_REUSE, PRESETS, CoreConfig, ReusePolicy, with_preset
from sglang_pic.errors import ConfigError


def test_options_are_read_and_absent_ones_are_the_defaults() -> None:
    for absent in (None, {}, {"thinking_budget": 3}, {"pic": None}, {"pic": {}}):
        assert parse_options(absent) == RequestOptions(mode=None, overrides={})
    assert parse_options({"pic": {"mode": "off"}}).mode is Mode.OFF
    assert parse_options({"pic": {"mode": "auto"}}).mode is Mode.AUTO
    server = CoreConfig(sink_tokens=7, tail_tokens=100)
    assert parse_options({"pic": {}}).policy(server) is server
    assert parse_options({"pic": {"seam_tokens": 8}}).policy(server) == replace(server, seam_tokens=8)
    assert parse_options({"pic": {"tail_tokens": 64}}).policy(server) == replace(server, tail_tokens=64)
    pin = parse_options({"pic": {"pin": "A.b_c-9", "skills": "near"}})
    assert pin == RequestOptions(pin="A.b_c-9", skills=Skills.NEAR)
    assert parse_options(NEAR["custom_params"]).skills is Skills.NEAR, "what the client sends"
    assert parse_options({"pic": {"unpin": "a" * 128, "pin": None, "skills": "far"}}) == RequestOptions(unpin="a" * 128)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("off", "'off'"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"seam_tokens": -1}, "seam_tokens=-1"),
        ({"seam_tokens": 10**9}, "seam_tokens=1000000000"),
        ({"seam_tokens": True}, "seam_tokens=True"),
        ({"tail_tokens": -1}, "tail_tokens=-1"),
        ({"edit": "fast"}, "edit='fast'"),
        ({"preset": "bold"}, "preset='bold'"),
        ({"seams": 1}, "'seams'"),
        # Experiments have it.
        ({"testing": {}}, "unknown key 'testing'"),
        ({"skills": "nearer"}, "skills='nearer'"),
        ({"pin": "a b"}, "pin='a b'"),
        ({"pin": "a" * 129}, "pin='aaa"),
        ({"unpin": "ä"}, "unpin='ä'"),
        ({"pin": "a", "pin_ttl_s": 0}, "pin_ttl_s=0"),
        ({"pin": "a", "pin_ttl_s": 604_801}, "pin_ttl_s=604801"),
        ({"pin": "a", "pin_priority": 101}, "pin_priority=101"),
        ({"pin": "a", "pin_priority": True}, "pin_priority=True"),
        ({"pin_ttl_s": 60}, "allowed only beside `pin`"),
    ],
)
def test_bad_options_are_named(options: object, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({"pic": options})
    assert named in str(caught.value)
    assert "must be" in str(caught.value) or "allowed" in str(caught.value)


def asked(*headers: tuple[str, str]) -> headers_of.Asked:
    return headers_of.read(Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in headers]))


def test_headers_are_options_of_any_request() -> None:
    found = asked(("x-pic-mode", "off"), ("x-pic-preset", "most"), ("x-pic-edit", "notes"), ("x-pic-salt", "tenant-1"))
    assert found == ({"mode": "off", "preset": "most", "edit": "notes"}, "tenant-1")
    assert asked(("x-request-id-pic-mode", "off"), ("x-request-id-pic-salt", "a")) == ({"mode": "off"}, "a")
    assert asked(("x-other", "1")) == ({}, None)
    pin = asked(("x-pic-pin", "a"), ("x-pic-pin-ttl-s", "60"), ("x-request-id-pic-pin-priority", "7"))
    assert pin == ({"pin": "a", "pin_ttl_s": 60, "pin_priority": 7}, None)
    for given in (None, {}, {"custom_params": None}, {"custom_params": {"pic": {"mode": "off"}, "other": 1}}):
        sent = SimpleNamespace(cache_salt=None, sampling_params=given)
        for _ in range(2):  # what is there already is no contradiction
            headers_of.put(found, sent)
        assert sent.cache_salt == "tenant-1"
        assert parse_options(sent.sampling_params["custom_params"]).mode is Mode.OFF
        assert sent.sampling_params["custom_params"].get("other") == (1 if given and given["custom_params"] else None)
    batch = SimpleNamespace(cache_salt=["tenant-1", None], sampling_params=[{}, {"n": 1}])
    headers_of.put(found, batch)
    assert [parse_options(each["custom_params"]).mode for each in batch.sampling_params] == [Mode.OFF] * 2


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ([("x-pic-mode", "fast")], "header x-pic-mode='fast': must be one of"),
        ([("x-pic-mode", "")], "header x-pic-mode=''"),
        ([("x-pic-preset", "bold")], "header x-pic-preset='bold'"),
        ([("x-pic-edit", "x" * 70_000)], "header x-pic-edit='xxx"),
        ([("x-pic-pin", "a"), ("x-pic-pin-ttl-s", "1.5")], "header x-pic-pin-ttl-s='1.5'"),
        ([("x-pic-salt", "")], "header x-pic-salt=''"),
        ([("x-pic-salt", "a b")], "header x-pic-salt='a b'"),
        ([("x-pic-salt", "\xe9")], "header x-pic-salt="),
        ([("x-pic-salt", "s" * 257)], "header x-pic-salt='sss"),
        ([("x-pic-mode", "off"), ("x-request-id-pic-mode", "off")], "header x-pic-mode: sent 2 times"),
        ([("x-pic-salt", "theirs"), ("x-pic-salt", "mine")], "header x-pic-salt: sent 2 times"),
        ([("x-pic-slat", "mine")], "header 'x-pic-slat': unknown; x-pic-salt is the nearest of"),
        ([("x-pic-salt", "mine"), ("x-request-id-pic-modes", "off")], "unknown; x-pic-mode is the nearest of"),
        ([("x_pic_salt", "mine")], "unknown; x-pic-salt is the nearest of"),
        ([("x-pic-" + "x" * 70_000, "mine")], "header 'x-pic-xxx"),
    ],
)
def test_bad_headers_are_named(headers: list[tuple[str, str]], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        asked(*headers)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("salt", "params", "named"),
    [
        ("theirs", {}, "x-pic-salt: the body has another cache_salt"),
        (["mine", "theirs"], [{}, {}], "x-pic-salt: the body has another cache_salt"),
        (None, {"custom_params": {"pic": {"mode": "auto"}}}, "x-pic-mode='off': custom_params.pic.mode is 'auto'"),
        (None, [{}, {"custom_params": {"pic": {"mode": "auto"}}}], "custom_params.pic.mode is 'auto'"),
        (None, {"custom_params": "x"}, "custom_params='x': must be an object"),
        (None, {"custom_params": {"pic": []}}, "custom_params.pic=[]: must be an object"),
        (None, ["x"], "sampling_params='x': must be an object"),
    ],
)
def test_a_body_that_contradicts_the_headers_is_refused(salt: object, params: object, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        headers_of.put(
            headers_of.Asked({"mode": "off"}, "mine"), SimpleNamespace(cache_salt=salt, sampling_params=params)
        )


def test_keys_of_the_tree_keep_requests_apart() -> None:
    for key in (None, "", "a"):
        assert tree_key(key) == key
    lanes = [(None, 0), (None, 1), (None, 2), ("recompile", 0), ("recompile", 1), ("in_place", 0), (OFF_LANE, 0)]
    keys = [tree_key(key, lane=lane, generation=generation) for key in (None, "a", "b") for lane, generation in lanes]
    assert len(set(keys)) == len(keys)
    assert [is_strict(key) for key in keys] == [*[False] * 6, True] * 3
    assert tree_key("a", lane=OFF_LANE, generation=3) == tree_key("a", lane=OFF_LANE)


def test_a_preset_is_a_lane_with_its_own_settings_and_what_is_given_beside_it_holds() -> None:
    server = CoreConfig(tail_tokens=100)
    most = parse_options({"pic": {"preset": "most", "seam_tokens": 8}})
    assert most.policy(server) == replace(ReusePolicy(**PRESETS["most"]), seam_tokens=8)
    assert most.lane(server) == "most in_place"
    assert most.lane(CoreConfig(**with_preset({"preset": "most", "tail_tokens": 100}))) is None
    careful = parse_options({"pic": {"preset": "careful"}})
    assert careful.policy(server) is not server
    assert careful.policy(server) == server
    assert careful.lane(server) is None
    assert careful.policy(MOST_REUSE) == ReusePolicy()
    assert careful.lane(MOST_REUSE) == "careful notes"


def parse(pic: object) -> RequestOptions:
    """The options of a request on a server that takes experiments."""
    return parse_probed(parse_options, {"pic": pic, "thinking_budget": 3})


def test_an_experiment_overrides_any_setting_of_the_policy_and_keeps_what_else_is_asked_for() -> None:
    options = parse({"seam_tokens": 8, "testing": {"rotate": False, "policy": {"seam_tokens": 4, "max_generation": 5}}})
    assert isinstance(options, ProbedOptions)
    assert options.overrides == {"seam_tokens": 8, "max_generation": 5}
    assert options.probe == RequestProbe(rotate=False, policy={"seam_tokens": 4, "max_generation": 5})
    assert parse({"testing": {"policy": {"edit": "recompile"}}}).overrides == {"edit": "recompile"}
    assert parse({"mode": "off", "testing": {}}).mode is Mode.OFF
    assert parse({"seam_tokens": 8}) == RequestOptions(overrides={"seam_tokens": 8})
    options = parse({"skills": "near", "pin": "a", "seam_tokens": 8, "testing": {"policy": {"tail_tokens": 0}}})
    assert (options.skills, options.pin, options.unpin) == (Skills.NEAR, "a", None)
    assert options.overrides == {"tail_tokens": 0, "seam_tokens": 8}
