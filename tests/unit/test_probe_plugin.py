"""The experiments' plugin: inert without its variable, refused with a line when the variable is wrong."""

from __future__ import annotations

import re

import pytest
from pic_bench.probe_plugin import PROBE_VARIABLE, register
from pic_bench.probe_plugin.options import ProbeConfig, ProbedOptions, RequestProbe, load, parse_probed

from sglang_pic.adapter.serve.options import Mode, RequestOptions, Skills, parse_options
from sglang_pic.errors import ConfigError


def parse(pic: object) -> RequestOptions:
    """The options of a request on a server that takes experiments."""
    return parse_probed(parse_options, {"pic": pic, "thinking_budget": 3})


def test_the_variable_switches_parts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROBE_VARIABLE, '{"ignore_prefix": true, "record_dir": "/tmp/x"}')
    config = load()
    assert config == ProbeConfig(ignore_prefix=True, record_dir="/tmp/x")
    assert config.names_on == ["ignore_prefix", "record_dir"]
    monkeypatch.delenv(PROBE_VARIABLE)
    assert load() is None
    monkeypatch.setattr("pic_bench.probe_plugin.plugin.check_contract", lambda _: pytest.fail("it does something"))
    register()


@pytest.mark.parametrize("text", ["yes", '{"ignore_prefixes": true}', '{"ignore_prefix": 1}', "[]"])
def test_a_wrong_variable_stops_the_server(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang swallows the exceptions of plugins: an experiment would run without its switches."""
    monkeypatch.setenv(PROBE_VARIABLE, text)
    with pytest.raises(SystemExit, match=f"{PROBE_VARIABLE}=.*ignore_prefix, check_invariants, request_options"):
        register()


def test_an_experiment_overrides_any_setting_of_the_policy_and_keeps_what_else_is_asked_for() -> None:
    options = parse({"seam_tokens": 8, "testing": {"rotate": False, "policy": {"seam_tokens": 4, "max_misfits": 5}}})
    assert isinstance(options, ProbedOptions)
    assert options.overrides == {"seam_tokens": 8, "max_misfits": 5}
    assert options.probe == RequestProbe(rotate=False, policy={"seam_tokens": 4, "max_misfits": 5})
    assert parse({"testing": {"policy": {"edit": "recompile"}}}).overrides == {"edit": "recompile"}
    assert parse({"mode": "off", "testing": {}}).mode is Mode.OFF
    assert parse({"seam_tokens": 8}) == RequestOptions(overrides={"seam_tokens": 8})
    options = parse({"skills": "near", "pin": "a", "seam_tokens": 8, "testing": {"policy": {"tail_tokens": 0}}})
    assert (options.skills, options.pin, options.unpin) == (Skills.NEAR, "a", None)
    assert options.overrides == {"tail_tokens": 0, "seam_tokens": 8}


@pytest.mark.parametrize(
    ("pic", "named"),
    [
        ({"testing": {"record": "../elsewhere"}}, "record='../elsewhere'"),
        ({"testing": {"turned": False}}, "turned"),
        ({"testing": {"policy": {"min_run_tokens": 0}}}, "min_run_tokens=0"),
        ({"seams": 1, "testing": {}}, "unknown key 'seams'"),
        ("off", "custom_params.pic='off'"),
    ],
)
def test_bad_options_are_named(pic: object, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        parse(pic)
