"""Settings: what is refused, and how the message reads."""

from __future__ import annotations

import argparse
import math
import re

import msgspec
import pytest

from sglang_pic.census import inputs
from sglang_pic.config import PicConfig, load_config, read_config
from sglang_pic.core import CoreConfig, PlanOptions
from sglang_pic.errors import ConfigError
from sglang_pic.settings import Setting, settings_of

BOUNDED = [(kind, each) for kind in (CoreConfig, PicConfig) for each in settings_of(kind).values() if each.range]


@pytest.mark.parametrize(("kind", "setting"), [pair for pair in BOUNDED if "." not in pair[1].name])
def test_a_bad_value_is_named_with_what_is_allowed(kind: type[CoreConfig | PicConfig], setting: Setting) -> None:
    low, high = setting.range or ()
    for value in (True, low, math.inf) if high == math.inf else (True, low - 1, high + 1):
        message = f"{setting.name}={value!r}: must be {setting.allowed}; {setting.default!r} is the default."
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            kind(**{setting.name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("chunk_min_tokens", 0), ("chunk_min_tokens", 64), ("chunk_max_tokens", 63)]
)
def test_sizes_of_chunks_are_bounded_by_their_average(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value}: must be an integer from \d+ to \d+; \d+ is the default"):
        CoreConfig(**{name: value})


@pytest.mark.parametrize("name", ["max_gaps", "max_runs", "compute_from"])
def test_limits_of_a_plan_are_checked(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{name}=-1: must be an integer from [01] to \d+; leave it out for no limit"
    ):
        PlanOptions(**{name: -1})


@pytest.mark.parametrize("kind", [CoreConfig, PicConfig])
def test_every_setting_is_declared_with_its_bounds_and_a_sentence(kind: type[CoreConfig | PicConfig]) -> None:
    declared = settings_of(kind)
    fields = {field.name for field in msgspec.structs.fields(kind)} - {"core", "testing"}
    assert fields == {name for name in declared if "." not in name}
    for name, setting in declared.items():
        assert re.fullmatch(r"[A-Z].*\.", setting.description), name
        assert setting.allows(setting.default), name


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"core": {"preset": "bold"}}', "preset"),
        ('{"core": {"preset": ["most"]}}', "preset"),
        ('{"audit_kl_limit": 5.0}', "audit_kl_cap=2.0: the limit must be below"),
        ('{"audit_min": 8, "audit_window": 4}', "audit_window=4: the minimum must be no more"),
        ('{"self_test": "on"}', "Invalid enum value 'on'"),
        ('{"mod": "off"}', "; did you mean 'mode'? (in the JSON text)"),
        ('{"core": {"seam_tokns": 1}}', "; did you mean 'core.seam_tokens'?"),
        ('{"seam_tokens": 1}', "; its place is in core"),
        ('{"core": {"mode": "off"}}', "; its place is beside core"),
        ('{"cost_gate": {"computed_token": 1}}', "; did you mean 'cost_gate.computed_token_us'?"),
        ('{"mode": "of"}', "; must be one of auto, off"),
        ('{"core": {"edit": "note"}}', "; must be one of notes, in_place, recompile"),
        ('{"audit_rate": "x"}', "; must be a number from 0 to 1 (in the JSON text)"),
        ('{"strip": ["claude-code-biling"]}', "did you mean 'claude-code-billing"),
    ],
)
def test_a_mistake_in_the_configuration_is_answered_with_what_is_allowed(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        read_config(text)


def test_the_default_preset_is_that_of_servers_and_of_the_census(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PIC_CONFIG", "")
    assert load_config() == PicConfig() == read_config('{"core": {"preset": "careful"}}')
    inputs.add_policy_arguments(parser := argparse.ArgumentParser())
    assert inputs.policy_of(parser.parse_args(["--sink", "32"])) == CoreConfig()


def test_a_preset_holds_where_nothing_is_given() -> None:
    most = read_config('{"core": {"preset": "most", "tail_tokens": 32}}').core
    assert (most.seam_tokens, most.tail_tokens, most.edit) == (1, 32, "in_place")
