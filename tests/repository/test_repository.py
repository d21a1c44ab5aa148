"""The rules of the repository that a machine can check: names, sizes, imports, documented commands, packaging."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.mutations import PAGE, Invariant, Mutation, read_table, render

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE_DIRS = [ROOT / "sglang_pic", *(ROOT / path for path in ("kernels", "traces", "bench"))]
LOCAL_DIRS = {"runs", "build", "dist"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cfg", ".html", ".css", ".js", ".svg", ".json", ".yaml", ".yml", ""}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def repository_files() -> Iterator[Path]:
    """Every text file that belongs to the repository, in a checkout as well as in an unpacked archive."""
    for entry in sorted(ROOT.iterdir()):
        if entry.is_file():
            if entry.name != ".git":  # in a linked work tree a file, which names where the repository lies
                yield entry
        elif entry.name == ".ci" or not (entry.name.startswith(".") or entry.name in LOCAL_DIRS):
            yield from (
                path
                for path in sorted(entry.rglob("*"))
                if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
            )


def python_files(*folders: Path) -> list[Path]:
    """The Python files below the folders."""
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def our_files() -> list[Path]:
    """The Python files of the product and of its tests."""
    return python_files(*SOURCE_DIRS, ROOT / "tests")


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a Python file, read once for all the rules."""
    return ast.parse(path.read_text())


def relative(path: Path) -> str:
    """The path as a reader of the repository names it."""
    return path.relative_to(ROOT).as_posix()


def output(*command: str | Path) -> str:
    """What a command prints, run in the repository's root."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("arguments", [["-c", "{}"], ["-m", "timeit", "-n", "1", "-r", "1", "-s", "{}", "pass"]])
def test_hugging_faces_kernels_resolves_from_the_root(arguments: list[str]) -> None:
    """Python puts the working directory first on its path, and SGLang imports a package called `kernels`."""
    try:
        wanted = distribution("kernels").locate_file("kernels/__init__.py")
    except PackageNotFoundError:
        pytest.skip("Hugging Face's kernels is not installed here; make setup installs it")
    code = "import kernels; print(kernels.__file__)"
    said = output(sys.executable, *(word.format(code) for word in arguments))
    assert said.splitlines()[0] == str(wanted)


def test_folders_of_packages_are_no_packages() -> None:
    assert not [folder for folder in SOURCE_DIRS[1:] if (folder / "__init__.py").exists()]


def test_cpu_environment_is_pinned_and_free_of_cuda() -> None:
    """torch is installed in a step of its own; every line is one exact version."""
    lines = [line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    names = Counter(re.sub(r"[-_.]+", "-", line.partition("==")[0].lower()) for line in lines)
    assert [name for name, count in names.items() if count > 1] == []
    assert "torch" not in names
    # nvidia-ml-py only reads counters, in plain Python.
    devices = re.compile(r"nvidia|cuda|cupy|flashinfer|sgl(ang)?-kernel")
    assert list(filter(devices.match, names)) == ["nvidia-ml-py"]
    wanted = {re.match(r"[A-Za-z0-9_.-]+", line).group().lower() for line in PROJECT["project"]["dependencies"]}  # type: ignore[union-attr]
    assert wanted <= set(names)


def test_files_are_short_and_functions_fit_on_a_screen() -> None:
    long = {relative(path): lines for path in our_files() if (lines := path.read_text().count("\n")) > MAX_FILE_LINES}
    assert long == {}, f"files over {MAX_FILE_LINES} lines"
    long = {
        f"{relative(path)}:{node.lineno} {node.name}": lines
        for path in our_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}, f"functions over {MAX_FUNCTION_LINES} lines"


def test_every_module_says_what_it_is_for() -> None:
    """In a sentence about the module, not about what it owns. Only the `__init__.py` of a folder may be empty."""
    wrong = [
        relative(path)
        for path in our_files()
        if path.name != "__init__.py" or path.read_text().strip()
        if (ast.get_docstring(parsed(path)) or "Owns").startswith("Owns")
    ]
    assert wrong == []


def test_every_module_of_the_product_has_a_name_of_its_own() -> None:
    """Who searches for `policy.py` finds one. A kernel's reference is called what the kernel is."""
    files = [path for path in python_files(*SOURCE_DIRS[:2]) if path.parent.name != "reference"]
    names = Counter(path.name for path in files if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_every_test_is_found() -> None:
    """pytest collects test_*.py only, and two test files of one name cannot be imported side by side."""
    files = [path for path in python_files(ROOT / "tests") if path.name not in ("__init__.py", "conftest.py")]
    helpers = [path for path in files if not path.name.startswith("test_")]
    hidden = [relative(path) for path in helpers if re.search(r"^\s*def test_", path.read_text(), re.MULTILINE)]
    assert hidden == []
    assert [name for name, count in Counter(path.name for path in files).items() if count > 1] == []
    assert [relative(path) for path in files if path.parent == ROOT / "tests"] == []


def test_no_file_names_a_registry_or_a_machine() -> None:
    """The repository installs from whatever pip is set up with, and runs wherever it lies."""
    hosts = ["pypi" + ".org", "python" + "hosted", "download.py" + "torch", "registry.npm" + "js", "wheels.vll" + "m"]
    places = re.compile(r"(?<![\w.~$}])/(?:work|root|opt/(?:wheels|pypi))/|" + "|".join(map(re.escape, hosts)))
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in repository_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if places.search(line)
    ]
    assert found == []


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton", "pic_kernels"}
    foreign = {relative(path): imported_packages(parsed(path)) - allowed for path in python_files(ROOT / "kernels")}
    assert {path: names for path, names in foreign.items() if names} == {}


def imported_packages(tree: ast.Module) -> set[str]:
    """The top-level names a module imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize(
    "modules",
    [
        "sglang_pic.cli, sglang_pic.config, sglang_pic.core, pic_traces",
        "pic_platform",
        "pic_replay, pic_replay.command, pic_generate",
    ],
    ids=["decisions", "platform", "replay"],
)
def test_importing_what_decides_loads_neither_torch_nor_sglang(modules: str) -> None:
    """SGLang imports the platform's entry point in every process of every server; gevent would patch ours."""
    code = f"import sys, {modules}; print({{'torch', 'triton', 'sglang', 'locust', 'gevent'}} & set(sys.modules))"
    assert output(sys.executable, "-c", code) == "set()\n"


def test_make_without_a_target_lists_the_targets() -> None:
    assert re.search(r"^  make demo +\S", output("make", "-s"), re.MULTILINE)


def test_setup_without_python_311_says_what_to_do(tmp_path: Path) -> None:
    """In a copy, so that the environment of the tests stays as it is."""
    for name in ("Makefile", "requirements-cpu.txt", "pyproject.toml", "bench/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    command = ["make", "-C", tmp_path, "setup", "PYTHON=/bin/false"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "error: PYTHON='/bin/false' is not a working Python 3.11 to 3.13" in done.stderr
    assert "make setup PYTHON=" in done.stderr
    assert not (tmp_path / ".venv" / "bin").exists()


def test_no_workflow_runs_code_of_others_with_rights_to_write() -> None:
    """Actions are pinned by commit, no token is left in a checkout, and a job that may write runs no `make`."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for name, job in workflow["jobs"].items():
            commands = " ".join(step.get("run", "") for step in job["steps"])
            assert "permissions" not in job or not re.search(r"\b(make|pip|python)\b", commands), name
            for step in job["steps"]:
                if "uses" in step:
                    assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False, name


INVARIANTS, MUTATIONS = read_table()
IDS = [f"{mutation.invariant}: {mutation.what}" for mutation in MUTATIONS]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=IDS)
def test_the_code_to_mutate_is_there_once_and_the_test_exists(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text("utf8").count(mutation.before) == 1
    assert mutation.before != mutation.after
    file, _, name = mutation.test.partition("::")
    text = (ROOT / file).read_text("utf8")
    assert not name or re.search(rf"^(def {name}\(|{name} = |class {name}\b)", text, re.MULTILINE)


def test_every_invariant_has_two_mutations_or_more() -> None:
    counts = Counter(mutation.invariant for mutation in MUTATIONS)
    assert [invariant.number for invariant in INVARIANTS] == list(range(1, 13)) == sorted(counts)
    assert min(counts.values()) >= 2


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.what)
def test_the_owner_of_an_invariant_has_code_that_keeps_it(invariant: Invariant) -> None:
    files = [mutation.file for mutation in MUTATIONS if mutation.invariant == invariant.number]
    assert f"sglang_pic/{invariant.owner}" in files


def test_the_page_has_the_list() -> None:
    page = PAGE.read_text("utf8")
    assert "<!-- invariants: begin -->" in page
    assert page == render(page), "write it by `python -m tests.mutations --page`"


def test_a_mutation_of_what_is_not_there_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    for before, found in (("= 1", 2), ("c = 1", 0)):
        mutation = Mutation(3, "changes", "code.py", before, "= 2", "tests/x.py::test_x")
        with pytest.raises(ValueError, match=f"invariant 3, 'changes': code.py has {found} times"):
            mutation.apply(tmp_path)
    assert Mutation(3, "changes", "code.py", "a = 1", "a = 2", "t").apply(tmp_path) == "a = 1\nb = 1\n"
    assert (tmp_path / "code.py").read_text() == "a = 2\nb = 1\n"
