"""A configuration with a mistake stops the server when the plugin is registered, in one line."""

from __future__ import annotations

import sys

import pytest

from sglang_pic.adapter import plugin
from sglang_pic.adapter.sglang import contract
from sglang_pic.config import read_config
from sglang_pic.errors import ConfigError

BACKEND = ["serve", "--radix-cache-backend", "pic"]


def test_a_bad_configuration_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreached(*_: object) -> None:
        raise AssertionError("the contract is read after the configuration")

    monkeypatch.setattr(contract, "check_contract", unreached)
    monkeypatch.setattr(sys, "argv", BACKEND)
    monkeypatch.setenv("SGLANG_PIC_CONFIG", '{"mod": "off"}')
    with pytest.raises(SystemExit) as stop:
        plugin.register()
    said = str(stop.value)
    assert said.startswith("sglang_pic: SGLANG_PIC_CONFIG: ")
    assert "did you mean 'mode'?" in said
    assert "\n" not in said


def test_a_stock_server_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(contract, "check_contract", lambda symbols=None: read.append(symbols) or [])
    monkeypatch.setattr(sys, "argv", ["serve"])
    monkeypatch.setenv("SGLANG_PIC_CONFIG", '{"mod": "off"}')
    for name in ("frontend.install", "draft_workers.install"):
        monkeypatch.setattr(f"sglang_pic.adapter.plugin.{name}", lambda: None)
    monkeypatch.setattr("sglang.srt.mem_cache.registry.register_radix_cache_backend", lambda *_: None)
    plugin.register()
    assert read == [contract.FRONT]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"mod": "off"}', "did you mean 'mode'?"),
        ('{"core": {"seam_tokns": 1}}', "did you mean 'core.seam_tokens'?"),
        ('{"seam_tokens": 1}', "its place is in core"),
        ('{"core": {"mode": "off"}}', "its place is beside core"),
        ('{"cost_gate": {"computed_token": 1}}', "did you mean 'cost_gate.computed_token_us'?"),
        ('{"mode": "of"}', "must be one of auto, off"),
        ('{"core": {"edit": "note"}}', "must be one of notes, in_place, recompile"),
        ('{"audit_rate": "x"}', "must be a number from 0 to 1"),
    ],
)
def test_a_mistake_in_the_configuration_is_answered_with_what_is_allowed(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(text)
    assert f"; {hint} (in the JSON text)" in str(error.value)
