"""The wheel holds what its verbs need, and an environment with nothing else runs them; what speaks against releases."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
from pic_traces import load

from sglang_pic import __version__
from sglang_pic.cli import EXTRAS, VERBS
from tests.conftest import ROOT

PACKAGES = {
    ".": ("sglang_pic", "kernels/pic_kernels", "traces/pic_traces"),
    "bench": tuple(f"bench/pic_{name}" for name in ("bench", "generate", "models", "platform", "replay")),
}
"""Of each distribution, by the folder of its `pyproject.toml`."""
REPOSITORY = "https://example.org/someone/project"
LEFT_OUT = ("*.md", "sglang_pic/*.png", "sglang_pic/*.svg")
"""Pages of the repository and their pictures: nothing reads them where the wheel is installed."""
NOTICES = "pic_traces/data/LICENSES.txt"
"""The licences of the recordings, which must go wherever the recordings go."""
NEEDS_SGLANG = ("model", "compare", "fidelity", "tune", "doctor")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels as `make wheel` builds them: from unpacked sdists, so that each sdist has all that it needs."""
    pytest.importorskip("hatchling", reason="make setup installs it")
    built = {}
    for part in PACKAGES:
        folder = tmp_path_factory.mktemp("dist")
        (sdist,) = build("sdist", ROOT / part, folder)
        subprocess.run(["tar", "-xf", sdist, "-C", folder], check=True)
        (source,) = (path for path in folder.iterdir() if path.is_dir())
        (built[part],) = build("wheel", source, folder)
    return built


def build(target: str, source: Path, folder: Path) -> list[Path]:
    """What hatchling builds of a source folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder]
    env = os.environ | {"REPOSITORY_URL": REPOSITORY}
    subprocess.run(command, cwd=source, env=env, check=True, capture_output=True, timeout=60)
    return [*folder.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[target])]


@pytest.mark.parametrize("part", PACKAGES)
def test_every_file_of_the_packages_is_in_the_wheel_but_pages(wheels: dict[str, Path], part: str) -> None:
    """Also tables, C sources, samples, templates, boards and rules; they are read beside the module that needs them."""
    wanted = {
        path.relative_to(folder.parent).as_posix()
        for folder in (ROOT / package for package in PACKAGES[part])
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheels[part]).namelist() if ".dist-info/" not in name}
    left_out = {name for name in wanted if any(fnmatch(name, pattern) for pattern in LEFT_OUT)}
    assert names == wanted - left_out
    assert {f"{package.rpartition('/')[2]}/py.typed" for package in PACKAGES[part]} <= names


def test_both_have_one_version_and_a_licence(wheels: dict[str, Path]) -> None:
    metadata = {}
    for part, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
            metadata[part] = archive.read(f"{folder}/METADATA").decode()
            assert "Apache License" in archive.read(f"{folder}/licenses/LICENSE").decode()
    assert all(f"\nVersion: {__version__}\n" in text for text in metadata.values())
    assert f"\nRequires-Dist: sglang-pic[census]=={__version__}\n" in metadata["bench"]


def test_an_index_page_has_addresses_and_no_relative_link(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["."]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    assert f"\nProject-URL: Source, {REPOSITORY}\n" in metadata
    assert f"({REPOSITORY}/blob/HEAD/sglang_pic/OPERATE.md)" in metadata
    assert f"]({REPOSITORY}/raw/HEAD/sglang_pic/how_it_works.svg)" in metadata
    assert re.findall(r"\]\((?!https?:)([^)\s]+)\)", metadata) == []


def test_the_notices_of_the_recordings_are_in_the_wheel(wheels: dict[str, Path]) -> None:
    """Whoever recorded a session is named with the licence, where installers look for licences and beside the data."""
    with zipfile.ZipFile(wheels["."]) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{folder}/METADATA").decode()
        page = archive.read(NOTICES).decode()
        assert archive.read(f"{folder}/licenses/traces/{NOTICES}").decode() == page
    assert "License-Expression: Apache-2.0 AND MIT AND BSD-3-Clause\n" in metadata
    holders = [line.replace("-", "").lower().strip() for line in page.splitlines() if ": Copyright" in line]
    for session in (*load("sample:agents"), *load("sample:opendevin")):
        assert session.license == "MIT"
        assert any(holder.startswith(session.source.partition("_")[0]) for holder in holders), session.source


@pytest.fixture(scope="module")
def installed(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command of a new environment that has the wheel and what the wheel depends on."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [folder / "venv" / "bin" / str(words[0]), *words[1:]]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240)

    assert run("pip", "install", "-q", wheels["."]).returncode == 0
    return run


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_verb_runs_in_an_environment_with_nothing_else(
    installed: Callable[..., subprocess.CompletedProcess[str]], wheels: dict[str, Path], tmp_path: Path
) -> None:
    """First alone, then with what a verb asks for, then up to where it needs SGLang or a server."""
    ours = [verb for verb in VERBS if not VERBS[verb].module.startswith("pic_")]
    for verb in VERBS:
        shown = installed("sglang-pic", verb, "--help")
        assert (shown.returncode, shown.stderr == "") == ((0, True) if verb in ours else (1, False)), verb
    shutil.copytree(ROOT / "bench" / "results" / "demo", tmp_path / "demo")
    runs: dict[str, list[str | Path]] = {
        "census": ["sample:opendevin"],
        "explain": ["clock:sample:agents", "--out", tmp_path / "page.html"],
        "fix": ["clock:sample:agents"],
        "report": [tmp_path / "demo"],
    }
    asked = []
    for verb, words in runs.items():
        done = installed("sglang-pic", verb, *words)
        if done.returncode:
            found = re.fullmatch(r"sglang-pic: error: .*: pip install (.+) in the repository\n", done.stderr)
            assert found is not None, done.stderr
            asked.append(found[1].strip("'"))
            # What is installed brings its extras, wherever it came from.
            wanted = wheels["bench"] if asked[-1] == "./bench" else asked[-1].replace(".", "sglang-pic", 1)
            assert installed("pip", "install", "-q", wanted).returncode == 0
            done = installed("sglang-pic", verb, *words)
        assert done.returncode == 0, done.stderr
    assert asked == [".[census]", "./bench"]
    for verb in VERBS:
        assert installed("sglang-pic", verb, "--help").returncode == 0
    assert installed("pip", "install", "-q", f"sglang-pic[{','.join(EXTRAS)}]").returncode == 0
    nobody = "http://127.0.0.1:9"
    for verb, words in {
        "model": ["tiny-gqa", tmp_path / "m"],
        "compare": ["sample:agents", "--model", "m", "--out", tmp_path / "c"],
        "fidelity": ["--model", "m", "--out", tmp_path / "f"],
        "tune": ["sample:agents", "--model", "m", "--out", tmp_path / "t"],
        "doctor": ["m"],
        "replay": ["sample:agents", "--base-url", nobody, "--out", tmp_path / "r"],
        "check": [nobody],
        "skill": ["list", "--base-url", nobody],
    }.items():
        done = installed("sglang-pic", verb, *words)
        assert done.returncode == (2 if verb in NEEDS_SGLANG else 1), verb
        assert re.fullmatch("sglang-pic: error: .*\n", done.stderr), f"{verb}: {done.stderr}"
        assert ("install SGLang first" in done.stderr) == (verb in NEEDS_SGLANG), done.stderr


FILES = {
    "sglang_pic/__init__.py": '__version__ = "0.2.0"\n',
    "sglang_pic/adapter/sglang/contract.py": 'BUILT_FOR = "0.5.23"\n',
    "bench/pyproject.toml": 'version = "0.2.0"\n',
    "CHANGELOG.md": (
        "# Changelog\n\n## [Unreleased]\n\n- One thing.\n\n### Tested with\n\n| SGLang | Python |\n| --- | --- |\n"
        "| 0.5.23 | 3.11 |\n\n## [0.1.0] - 2026-01-02\n\n- Another.\n"
    ),
}


def script(name: str) -> ModuleType:
    """A script of `.ci`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
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
    for name in ("MODULE", "BENCH", "CHANGELOG"):
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
