"""A function of SGLang that was rewritten under its old name is told to the operator, by name and once."""

from __future__ import annotations

import ast
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pic_bench.contract.write_bodies import add_version

from sglang_pic.adapter.sglang import bodies, contract, source
from sglang_pic.adapter.sglang.bodies import TESTED_BODIES, changed_bodies, digest
from sglang_pic.adapter.sglang.contract import ATTENTION_BODIES, BODIES, BUILT_FOR, FEATURES, installed_version

_LOCK = '''
class Tree:
    def lock(self, node, *, depth=1):
        """Locks a path."""
        # From the leaf on.
        return [node.lock() for _ in range(depth)]
'''
_SAME = """
class Tree:

    def lock(
        self, node, *, depth = 1,
    ):
        return [ node.lock() for _ in range(depth) ]  # leaf first
"""
PATH = "stand_in.srt.Tree.lock"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package in SGLang's place; calling it writes its source."""
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> None:
        (tmp_path / "stand_in" / "srt.py").write_text(text)
        source.forget()

    yield write
    sys.modules.pop("stand_in", None)
    source.forget()


def body(text: str) -> ast.AST:
    return ast.parse(text).body[0].body[0]  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("old", "new"),
    [("depth=1", "depth=2"), ("node.lock()", "node.unlock()"), ("self, node", "self, leaf"), ("def", "async def")],
)
def test_whatever_runs_otherwise_counts(old: str, new: str) -> None:
    assert digest(body(_LOCK)) != digest(body(_LOCK.replace(old, new)))


def test_a_changed_body_is_found_in_the_installed_package(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "TESTED_BODIES", {PATH: {digest(body(_LOCK)): ("1.0",)}})
    stand_in(_SAME)
    assert changed_bodies([PATH]) == []
    stand_in(_LOCK.replace("depth=1", "depth=2"))
    assert changed_bodies([PATH]) == [PATH]
    stand_in("")
    assert changed_bodies([PATH]) == [PATH], "a function that is gone is not what was tested"


def test_a_table_keeps_every_version(stand_in: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Versions with one body share a digest; writing a version again changes nothing."""
    monkeypatch.setattr(bodies, "TABLE", tmp_path / "bodies.toml")

    def add(text: str, version: str) -> dict[str, Any]:
        stand_in(text)
        assert add_version([PATH], version) == 1
        table = bodies.read_table(bodies.TABLE)
        monkeypatch.setattr(bodies, "TESTED_BODIES", table)
        return dict(table[PATH])

    add(_LOCK, "1.0")
    assert list(add(_SAME, "1.1").values()) == [("1.0", "1.1")]
    assert list(add(_LOCK.replace("depth=1", "depth=2"), "1.1").values()) == [("1.0",), ("1.1",)]
    before = bodies.TABLE.read_text()
    add(_LOCK.replace("depth=1", "depth=2"), "1.1")
    assert bodies.TABLE.read_text() == before
    assert add_version([PATH], "1.1", lacking=[PATH]) == 0
    assert [*bodies.read_table(bodies.TABLE)[PATH].values()] == [("1.0",)], "servers that need it are refused"


def test_the_table_has_the_known_versions_of_what_the_contract_names() -> None:
    """Fails when a symbol was added without its digest: `make contract` writes it."""
    assert BUILT_FOR in bodies.known_versions()
    assert set(TESTED_BODIES) == {*BODIES, *(path for paths in ATTENTION_BODIES.values() for path in paths)}
    if installed_version() not in bodies.known_versions():
        pytest.skip(f"SGLang {installed_version()} is none of the tested versions")
    relied_on = set(TESTED_BODIES)
    for symbols in FEATURES.values() if installed_version() != BUILT_FOR else ():
        # With another version servers that have a feature may be refused: then no symbol of it has a digest.
        paths = {symbol.path for symbol in symbols}
        if not any(installed_version() in found for path in paths for found in TESTED_BODIES[path].values()):
            relied_on -= paths
    versions = [version for path in changed_bodies(relied_on) for version in TESTED_BODIES[path]]
    assert versions == []


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_start_up_names_the_changed_bodies_once(
    rank: int, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_pic.adapter import support

    runner = SimpleNamespace(prefill_attention_backend_str="triton")
    ctx: Any = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), tp_rank=rank)
    caplog.set_level(logging.WARNING)
    support.warn_of_changes(ctx, [])
    assert caplog.messages == [], "nothing differs from what was tested"
    forward = ATTENTION_BODIES["triton"][0]
    monkeypatch.setattr(bodies, "TESTED_BODIES", {**TESTED_BODIES, forward: {"0" * 12: (BUILT_FOR,)}})
    support.warn_of_changes(ctx, ["sglang.srt.plugins.hook_registry.HookRegistry.register"])
    assert len(caplog.messages) == lines
    for message in caplog.messages:
        assert "in 2 functions that the cache relies on: " in message
        assert f"plugins.hook_registry.HookRegistry.register, {forward.removeprefix('sglang.srt.')}" in message
        assert f"sglang=={BUILT_FOR}" in message
        assert "\n" not in message


@pytest.mark.parametrize("argv", [["--radix-cache-backend=pic"], []])
def test_registration_hands_the_changed_bodies_to_the_cache(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole contract is read once, before the server loads weights where its arguments ask for the backend."""
    from sglang.srt.mem_cache import registry

    from sglang_pic.adapter import plugin
    from sglang_pic.adapter.serve import frontend

    made: list[Any] = []
    read: list[Any] = []

    def check(symbols: Any = contract.CONTRACT) -> list[str]:
        read.append(symbols)
        return ["sglang.srt.changed"] if symbols is contract.CONTRACT else []

    monkeypatch.setattr(contract, "check_contract", check)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(frontend, "install", lambda: None)
    monkeypatch.setattr(registry, "register_radix_cache_backend", lambda _name, factory: made.append(factory))
    monkeypatch.setattr(
        "sglang_pic.adapter.factory.create_cache", lambda _ctx, changed_bodies: made.append(changed_bodies)
    )
    plugin.register()
    assert read == ([contract.CONTRACT] if argv else [contract.FRONT]), "a stock server reads little"
    made[0](None)
    assert made[1] == ["sglang.srt.changed"]
    assert read.count(contract.CONTRACT) == 1
