"""The console script: exit codes, one-line errors, and help that costs nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sglang_pic import __version__
from sglang_pic.cli import EXTRAS, VERBS, Verb, main

ROOT = Path(__file__).resolve().parent.parent.parent
BODIES = {
    "ok": "return args.code",
    "config": "from sglang_pic.errors import ConfigError; raise ConfigError('seam_tokens=-1: must be 0 or more.')",
    "trace": "from pic_traces.errors import TraceError; raise TraceError('t.jsonl line 3: not JSON')",
    "interrupted": "raise KeyboardInterrupt",
    "socket": "raise BrokenPipeError('a socket')",
    "import": "import not_installed_anywhere",
    "own": "import sglang_pic.no_such_module",
}


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A verb of a throwaway module whose `run` is one of BODIES."""
    name = f"verb_{request.param}"
    at_import = BODIES[request.param] if request.param in ("import", "own") else ""
    source = (
        f"{at_import}\n"
        "def add_arguments(parser):\n"
        "    parser.epilog = 'notes of the verb'\n"
        "    parser.add_argument('--code', type=int, default=0)\n"
        f"def run(args):\n    {BODIES[request.param]}\n"
    )
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(VERBS, name, Verb(name, "help", "A description.", (f"sglang-pic {name} --code 3",)))
    return name


@pytest.mark.parametrize("verb", ["ok"], indirect=True)
def test_verb_decides_the_exit_code(verb: str) -> None:
    assert main([verb, "--code", "3"]) == 3


@pytest.mark.parametrize("verb", ["ok"], indirect=True)
def test_help_of_a_verb_has_its_notes_and_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.endswith(f"notes of the verb\n\nexample:\n  sglang-pic {verb} --code 3\n")


@pytest.mark.parametrize(("verb", "code"), [("config", 2), ("trace", 1), ("import", 1)], indirect=["verb"])
def test_error_is_one_line_on_stderr(verb: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sglang-pic: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", ["interrupted"], indirect=True)
def test_interrupt_is_130(verb: str) -> None:
    assert main([verb]) == 130


@pytest.mark.parametrize(("verb", "error"), [("socket", BrokenPipeError), ("own", ImportError)], indirect=["verb"])
def test_bug_keeps_its_traceback(verb: str, error: type[Exception]) -> None:
    """A broken socket is no closed stdout, and a module of ours that is missing is no missing package."""
    with pytest.raises(error):
        main([verb])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"sglang-pic {__version__}\n"


def test_no_verb_shows_the_help_and_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "verbs:" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["nonsense"], ["--nonsense"]])
def test_unknown_word_is_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2


@pytest.mark.parametrize("name", sorted(VERBS))
def test_help_of_every_verb_loads_nothing_heavy(name: str) -> None:
    """Answering `--help` must not wait for torch, SGLang, locust or a plotting library."""
    heavy = ["torch", "transformers", "sglang", "locust", "gevent", "matplotlib", "pandas"]
    script = (
        "import sys\nfrom sglang_pic.cli import main\n"
        f"try:\n    main([{name!r}, '--help'])\n"
        f"except SystemExit as stop:\n    assert stop.code == 0\n"
        f"print(sorted(set({heavy}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "[]\n"
    assert "example" in done.stdout
    assert VERBS[name].examples[0] in done.stdout


def test_extras_are_those_of_the_package() -> None:
    """A package that is added to an extra must be asked for by the verbs that import it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[^\w-]", requirement)[0] for requirement in extras[extra]}
        assert {name.replace("-", "_").removesuffix("_py") for name in names} == set(modules)


MODULES = sorted({module for modules in EXTRAS.values() for module in modules})
RUNS = {
    "replay": (["gen:random?sessions=1", "--base-url", "http://127.0.0.1:9", "--out", "run"], "[bench]"),
    "compare": (["gen:random?sessions=1", "--model", "m", "--out", "run"], "[bench]"),
    "fidelity": (["--model", "m", "--out", "run"], "[bench,census]"),
    "report": (["run"], "[bench]"),
    "census": (["gen:random?sessions=1"], "[census]"),
    "explain": (["gen:random?sessions=1", "--out", "page.html"], "[census]"),
    "skill": (["list"], "[client]"),
}


# `model` and `doctor` need SGLang and its own packages only.
@pytest.mark.parametrize("name", sorted(set(VERBS) - {"model", "doctor"}))
def test_verb_without_its_extra_names_the_one_to_install(name: str, tmp_path: Path) -> None:
    """Without any extra a verb ends in one line, not in a traceback."""
    words, extra = RUNS[name]
    blocked = f"sys.modules.update(dict.fromkeys({MODULES}))"
    script = f"import sys; {blocked}; from sglang_pic.cli import main; sys.exit(main({[name, *words]}))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"sglang-pic: error: `sglang-pic {name}` needs ")
    assert done.stderr.endswith(f"not installed here: pip install '.{extra}' in the repository\n")
    assert done.stderr.count("\n") == 1


WORKERS = {
    "replay": "pic_traces.replay",
    "compare": "pic_bench.compare.compare",
    "fidelity": "pic_bench.fidelity.runner",
    "report": "pic_bench.compare.combined, pic_bench.fidelity.report, pic_bench.fidelity.folder",
    "census": "sglang_pic.census.table",
    "explain": "sglang_pic.explain.page",
    "skill": "sglang_pic.client",
}
"""What `run` of a verb imports."""


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_a_verb_imports_no_module_of_an_extra_that_it_does_not_ask_for(name: str) -> None:
    blocked = f"sys.modules.update(dict.fromkeys({sorted(set(MODULES) - set(VERBS[name].needs))}))"
    script = f"import sys; {blocked}; import {WORKERS[name]}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_closed_pipe_is_no_traceback() -> None:
    """As in `sglang-pic --help | head -0`: the reader is gone before the first byte."""
    script = "import sys; sys.stdin.readline(); from sglang_pic.cli import main; sys.exit(main(['--help']))"
    command = [sys.executable, "-c", script]
    # Unbuffered, argparse itself would swallow the error.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=buffered) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
