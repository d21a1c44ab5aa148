"""The experiments' plugin: inert without its variable, refused with a line when the variable is wrong."""

from __future__ import annotations

import pytest
from pic_bench.probe_plugin import PROBE_VARIABLE, register
from pic_bench.probe_plugin.options import ProbeConfig, ProbedOptions, RequestProbe, load, parse_probed

from sglang_pic.adapter.serve.options import Mode, RequestOptions, Skills, parse_options
from sglang_pic.errors import ConfigError


def parse(pic: object) -> RequestOptions:
    """The options of a request on a server that takes experiments."""
    return parse_probed(parse_options, {"pic": pic, "thinking_budget": 3})


def test_without_the_variable_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROBE_VARIABLE, raising=False)
    assert load() is None
    monkeypatch.setattr("pic_bench.probe_plugin.plugin.check_contract", lambda _: pytest.fail("it does something"))
    register()


def test_the_variable_switches_parts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROBE_VARIABLE, '{"ignore_prefix": true, "record_dir": "/tmp/x"}')
    config = load()
    assert config == ProbeConfig(ignore_prefix=True, record_dir="/tmp/x")
    assert config.names_on == ["ignore_prefix", "record_dir"]


@pytest.mark.parametrize("text", ["yes", '{"ignore_prefixes": true}', '{"ignore_prefix": 1}', "[]"])
def test_a_wrong_variable_stops_the_server(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang swallows the exceptions of plugins: an experiment would run without its switches."""
    monkeypatch.setenv(PROBE_VARIABLE, text)
    with pytest.raises(SystemExit, match=f"{PROBE_VARIABLE}=.*ignore_prefix, check_invariants, request_options"):
        register()


def test_an_experiment_overrides_any_setting_of_the_policy() -> None:
    options = parse({"seam_tokens": 8, "testing": {"rotate": False, "policy": {"seam_tokens": 4, "max_misfits": 5}}})
    assert isinstance(options, ProbedOptions)
    assert options.overrides == {"seam_tokens": 8, "max_misfits": 5}
    assert options.probe == RequestProbe(rotate=False, policy={"seam_tokens": 4, "max_misfits": 5})
    assert parse({"testing": {"policy": {"edit": "recompile"}}}).overrides == {"edit": "recompile"}
    assert parse({"mode": "off", "testing": {}}).mode is Mode.OFF
    assert parse({"seam_tokens": 8}) == RequestOptions(overrides={"seam_tokens": 8})


@pytest.mark.parametrize(
    ("testing", "named"),
    [
        ({"record": "../elsewhere"}, "record='../elsewhere'"),
        ({"record": ".hidden"}, "record='.hidden'"),
        ({"turned": False}, "turned"),
        ({"rotate": 0}, "bool"),
        ({"policy": {"min_run_tokens": 0}}, "min_run_tokens=0"),
        ({"policy": {"min_run": 1}}, "min_run"),
        ({"policy": {"edit": "never"}}, "'never'"),
    ],
)
def test_bad_experiments_are_named(testing: object, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"testing": testing})
    assert named in str(caught.value)


def test_an_experiment_keeps_what_else_the_request_asks_for() -> None:
    options = parse({"skills": "near", "pin": "a", "seam_tokens": 8, "testing": {"policy": {"tail_tokens": 0}}})
    assert (options.skills, options.pin, options.unpin) == (Skills.NEAR, "a", None)
    assert options.overrides == {"tail_tokens": 0, "seam_tokens": 8}


def test_other_bad_options_are_named_as_ever() -> None:
    with pytest.raises(ConfigError, match="unknown key 'seams'"):
        parse({"seams": 1, "testing": {}})
    with pytest.raises(ConfigError, match=r"custom_params.pic='off'"):
        parse("off")
