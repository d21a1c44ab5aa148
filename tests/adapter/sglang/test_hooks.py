"""A hook that SGLang did not put in place must stop the server: SGLang logs the failure and goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry as registry

from sglang_pic.adapter import plugin
from sglang_pic.adapter.sglang import contract, hooks
from sglang_pic.adapter.sglang.hooks import apply_hooks, hook
from sglang_pic.errors import ContractError


class Runner:
    """A class of SGLang."""

    def forward(self) -> str:
        return "stock"

    @classmethod
    def init_new(cls) -> str:
        return "stock"


def double(original: Callable[..., str], *args: Any) -> str:
    return f"hooked {original(*args)}"


def annotate(result: str, *_: Any) -> str:
    return f"{result} hooked"


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Runner]]:
    """A module of SGLang with a fresh class, and registries with nothing else in them."""
    made: Any = type("Runner", (), dict(vars(Runner)))
    module = ModuleType("sglang.srt.pic_test_target")
    module.Runner = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(hooks, "_registered", [])
    names = [
        f"{module.__name__}.{name}"
        for name in ("Runner.forward", "Runner.init_new", "Runner.backward", "Walker.forward")
    ]
    whens = {"here": "around", "there": "after"}
    monkeypatch.setattr(hooks, "HOOKS", {owner: dict.fromkeys(names, when) for owner, when in whens.items()})
    monkeypatch.setattr(registry, "_hooks", type(registry._hooks)(list))
    monkeypatch.setattr(registry, "_patched", set())
    return made


def test_hooks_in_place_are_proved(target: Any) -> None:
    hook("here", "Runner.forward", double)
    hook("there", "Runner.forward", annotate)
    hook("there", "Runner.init_new", annotate)
    apply_hooks()
    assert (target().forward(), target.init_new()) == ("hooked stock hooked", "stock hooked")


@pytest.mark.parametrize("gone", ["Runner.backward", "Walker.forward"])
def test_a_target_that_is_gone_stops_the_server(gone: str) -> None:
    hook("here", "Runner.forward", double)
    hook("here", gone, double)
    with pytest.raises(ContractError, match=rf"^sglang\.srt\.pic_test_target\.{gone}: not hooked, .*without"):
        apply_hooks()


def test_a_target_that_another_plugin_hooked_first_stops_the_server(target: Any) -> None:
    """SGLang wraps a target once: hooks that are registered afterwards do nothing, and SGLang says nothing."""
    registry.register("sglang.srt.pic_test_target.Runner.forward", annotate)
    registry.apply_hooks()
    hook("here", "Runner.forward", double)
    with pytest.raises(ContractError, match=r"Runner\.forward: not hooked"):
        apply_hooks()
    assert target().forward() == "stock hooked"


def test_another_plugin_may_wrap_what_we_hooked_but_not_replace_it(target: Any) -> None:
    hook("here", "Runner.forward", double)
    apply_hooks()
    registry._patched.clear()
    registry.register("sglang.srt.pic_test_target.Runner.forward", annotate)
    apply_hooks()
    target.forward = lambda _: "theirs"
    with pytest.raises(ContractError, match=r"Runner\.forward: not hooked"):
        apply_hooks()


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
