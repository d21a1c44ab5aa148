"""Cutting a release: what speaks against it is said before anything is written."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = {
    "sglang_pic/__init__.py": '__version__ = "0.2.0"\n',
    "sglang_pic/adapter/contract.py": 'BUILT_FOR = "0.5.23"\n',
    "CHANGELOG.md": (
        "# Changelog\n\n## [Unreleased]\n\n- One thing.\n\n### Tested with\n\n| SGLang | Python |\n| --- | --- |\n"
        "| 0.5.23 | 3.11 |\n\n## [0.1.0] - 2026-01-02\n\n- Another.\n"
    ),
}


def script(name: str) -> ModuleType:
    """A script of `.ci`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script for a small repository that is ready for 0.2.0."""
    module = script("release")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("MODULE", "CHANGELOG"):
        monkeypatch.setattr(module, name, tmp_path / getattr(module, name).relative_to(ROOT))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "m"], [*who, "tag", "-a", "v0.1.0", "-m", "m"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)
    return module


@pytest.mark.parametrize(
    ("version", "file", "old", "new", "said"),
    [
        ("0.2.0", None, "", "", []),
        ("1.0.0", None, "", "", []),
        ("0.2", None, "", "", ["must be MAJOR.MINOR.PATCH"]),
        ("0.1.0", None, "", "", ["v0.1.0 is tagged already", "__init__.py is at 0.2.0"]),
        ("0.2.0", "CHANGELOG.md", "- One thing.\n", "", ["the tree has changes: CHANGELOG.md", "lists nothing"]),
        ("0.2.0", "CHANGELOG.md", "| 0.5.23", "| 0.5.22", ["the tree has changes", "no row of SGLang 0.5.23"]),
    ],
)
def test_what_speaks_against_a_release(
    release: ModuleType, version: str, file: str | None, old: str, new: str, said: list[str]
) -> None:
    if file is not None:
        path = release.ROOT / file
        path.write_text(path.read_text().replace(old, new))
    found = list(release.problems(version))
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True)), found


def test_a_release_gets_its_date_and_what_it_was_tested_with() -> None:
    release, tested = script("release"), script("tested")
    text = tested.with_row(FILES["CHANGELOG.md"], "| 0.5.24 | 3.11 | new |")
    text = tested.with_row(text, "| 0.5.23 | 3.11 | again |")
    text = release.dated(text, "0.2.0", "2026-03-04")
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-03-04\n\n- One thing." in text
    assert "| --- | --- |\n| 0.5.24 | 3.11 | new |\n| 0.5.23 | 3.11 | again |\n\n## [0.1.0]" in text


def test_the_changelog_has_the_places_that_a_release_fills() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    row = script("tested").row_of("0.5.23", "3.11", (3, 2, 1))
    assert row in script("tested").with_row(text, row)
    assert script("release").dated(text, "9.9.9", "today") != text
