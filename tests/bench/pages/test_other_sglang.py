"""What became of the contract in an SGLang that is not installed."""

from __future__ import annotations

import ast
import importlib.util
import zipfile
from pathlib import Path

import pytest
from pic_bench.contract import other_sglang
from pic_bench.contract.other_sglang import EVERY, State, check_other, main

from sglang_pic.adapter.sglang import bodies, source
from sglang_pic.adapter.sglang.contract import BUILT_FOR, Symbol, installed_version
from sglang_pic.errors import ConfigError

_TREE = """
raise RuntimeError("imported")
class Tree:
    def lock(self, node): return node
    def match(self, key, *, req=None): return key
"""
_OTHER = """
class Mixin:
    def evict(self): ...
class Request:
    def __init__(self, rid): ...
"""
_TESTED = bodies.digest(ast.parse(_TREE).body[1].body[0])  # type: ignore[attr-defined]
_SYMBOLS = {
    "tree.Tree.lock": (("node",), State.FOUND),
    "tree.Tree.match": (("key", "req"), State.UNTESTED),
    "tree.Tree": (("self.host",), State.CHANGED),
    "tree.Tree.evict": ((), State.MOVED),
    "requests.Request": (("rid",), State.MOVED),
    "tree.Tree.reset": ((), State.MISSING),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an SGLang of two modules, and a contract of six lines."""
    package = tmp_path / "python" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "_version.py").write_text("__version__ = version = '9.9.9'\n")
    (package / "srt" / "tree.py").write_text(_TREE)
    (package / "srt" / "other.py").write_text(_OTHER)
    lines = [
        Symbol(f"sglang.srt.{path}", words, why="a test")
        if path != "tree.Tree"
        else Symbol(f"sglang.srt.{path}", (), words, "a test")
        for path, (words, _) in _SYMBOLS.items()
    ]
    monkeypatch.setattr(other_sglang, "CONTRACT", lines[:2])
    monkeypatch.setattr(other_sglang, "HTTP", ())
    monkeypatch.setattr(other_sglang, "FEATURES", {"images": lines[2:]})
    monkeypatch.setattr(other_sglang, "ATTENTION_BODIES", {})
    monkeypatch.setattr(other_sglang, "BODIES", [line.path for line in lines])
    tested = {line.path: {"0" * 12: ("1.0",)} for line in lines} | {"sglang.srt.tree.Tree.lock": {_TESTED: ("1.0",)}}
    monkeypatch.setattr(bodies, "TESTED_BODIES", tested)
    return tmp_path


def test_each_line_is_found_or_moved_or_changed_or_missing(folder: Path) -> None:
    found = check_other(str(folder))
    assert {line.path: line.state for line in found.lines} == {
        f"sglang.srt.{path}": state for path, (_, state) in _SYMBOLS.items()
    }
    details = {line.path: line.detail for line in found.lines}
    assert details["sglang.srt.tree.Tree.evict"] == "is sglang.srt.other.Mixin.evict"
    assert details["sglang.srt.requests.Request"] == "is sglang.srt.other.Request"
    assert details["sglang.srt.tree.Tree"] == "no longer has 'self.host'"
    assert {line.needed_by for line in found.lines} == {EVERY, "servers with images in prompts"}
    assert (found.version, found.starts) == ("9.9.9", True), "what no server needs stops none"


def test_a_wheel_is_read_without_installing_or_importing_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel, package = folder / "sglang-9.9.9-py3-none-any.whl", folder / "python" / "sglang"
    with zipfile.ZipFile(wheel, "w") as made:
        for file in package.rglob("*.py"):
            made.write(file, f"sglang/{file.relative_to(package)}")
    assert main([str(wheel)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"SGLang 9.9.9 in {wheel}"
    assert said[-2] == "6 lines of the contract: 1 found, 1 untested body, 1 changed, 2 moved, 1 missing"
    assert said[-1] == "would start, but not servers with images in prompts"
    (package / "srt" / "tree.py").write_text(_TREE.replace("node", "leaf"))
    assert main([str(package)]) == 1
    assert "sglang.srt.tree.Tree.lock has no parameter 'node'" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(installed_version() != BUILT_FOR, reason="another version is another SGLang")
def test_the_installed_version_has_every_line() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found = check_other(spec.submodule_search_locations[0])
    assert found.version == BUILT_FOR
    assert [line for line in found.lines if line.state is not State.FOUND] == []
    assert source.find("sglang.srt.no_such_module.thing") is None, "the installed package is read again"


def test_a_folder_without_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a wheel of SGLang, or a folder that has it in sglang/srt"):
        check_other(str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
