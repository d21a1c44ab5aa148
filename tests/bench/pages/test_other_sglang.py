"""What became of the contract in an SGLang that is not installed."""

from __future__ import annotations

import ast
import importlib.util
import zipfile
from pathlib import Path

import pytest
from pic_bench.contract import other_sglang
from pic_bench.contract.other_sglang import EVERY, UNTESTED, differences, main, unpacked

from sglang_pic.adapter.sglang import bodies, source
from sglang_pic.adapter.sglang.contract import BUILT_FOR, Symbol, installed_version

_TREE = """
raise RuntimeError("imported")
class Tree:
    def lock(self, node): return node
    def match(self, key, *, req=None): return key
"""
_TESTED = bodies.digest(ast.parse(_TREE).body[1].body[0])  # type: ignore[attr-defined]
_SYMBOLS = {
    "tree.Tree.lock": (("node",), None),
    "tree.Tree.match": (("key", "req"), UNTESTED),
    "tree.Tree": (("self.host",), "no longer has 'self.host'"),
    "tree.Tree.reset": ((), "is missing"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an SGLang of one module, and a contract of four lines."""
    package = tmp_path / "python" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "_version.py").write_text("__version__ = version = '9.9.9'\n")
    (package / "srt" / "tree.py").write_text(_TREE)
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


def test_each_line_is_there_or_changed_or_missing(folder: Path) -> None:
    with unpacked(str(folder)) as package, source.reading(package):
        found = differences()
    wanted = {f"sglang.srt.{path}": what for path, (_, what) in _SYMBOLS.items() if what is not None}
    first, *others = wanted.items()
    assert found == {EVERY[0]: dict([first]), "servers with images in prompts": dict(others)}


def test_a_wheel_is_read_without_installing_or_importing_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel, package = folder / "sglang-9.9.9-py3-none-any.whl", folder / "python" / "sglang"
    with zipfile.ZipFile(wheel, "w") as made:
        for file in package.rglob("*.py"):
            made.write(file, f"sglang/{file.relative_to(package)}")
    assert main([str(wheel)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (said[0], len(said)) == (f"SGLang 9.9.9 in {wheel}", 7)
    assert said[-1] == "would start, but not servers with images in prompts; start-up checks the live model"
    (package / "srt" / "tree.py").write_text(_TREE.replace("node", "leaf"))
    assert main([str(package)]) == 1
    assert "sglang.srt.tree.Tree.lock has no parameter 'node'" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(installed_version() != BUILT_FOR, reason="another version is another SGLang")
def test_the_installed_version_has_every_line() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    with source.reading(Path(spec.submodule_search_locations[0])):
        assert differences() == {}
    assert source.find("sglang.srt.no_such_module.thing") is None, "the installed package is read again"


def test_a_folder_without_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert "must be a wheel of SGLang, or a folder that has it in sglang/srt" in capsys.readouterr().err
