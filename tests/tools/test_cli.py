"""The console script: exit codes, one-line errors, and help that costs nothing."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from pic_bench.server_flags import server_flags
from pic_traces.errors import OptionError, ReplayError, TraceError
from pic_traces.printable import printable_output

from sglang_pic import __version__, cli
from sglang_pic.cli import EXIT_FAILED, EXIT_USAGE, EXTRAS, VERBS, Verb, exits_of, main
from sglang_pic.errors import BenchError, ConfigError, PicError, ServerError, UnsupportedError
from tests.conftest import ROOT

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


@pytest.mark.parametrize(("verb", "code"), [("ok", 3), ("interrupted", 130)], indirect=["verb"])
def test_verb_decides_the_exit_code_and_an_interrupt_is_130(verb: str, code: int) -> None:
    assert main([verb, "--code", "3"]) == code


@pytest.mark.parametrize("verb", ["ok"], indirect=True)
def test_help_of_a_verb_has_its_notes_and_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    help_ = capsys.readouterr().out
    assert help_.endswith(f"  130  interrupted\n\nexample:\n  sglang-pic {verb} --code 3\n")
    assert "notes of the verb\n\nexit codes:\n" in help_


@pytest.mark.parametrize(("verb", "code"), [("config", 2), ("trace", 2), ("import", 2)], indirect=["verb"])
def test_error_is_one_line_on_stderr(verb: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"sglang-pic: error: .+\n", err)


@pytest.mark.parametrize(("verb", "error"), [("socket", BrokenPipeError), ("own", ImportError)], indirect=["verb"])
def test_bug_keeps_its_traceback(verb: str, error: type[Exception]) -> None:
    """A broken socket is no closed stdout, and a module of ours that is missing is no missing package."""
    with pytest.raises(error):
        main([verb])


def test_version_is_ok_and_no_verb_or_an_unknown_word_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for word, code, out in ("--version", 0, f"sglang-pic {__version__}\n"), ("nonsense", 2, ""), ("--nonsense", 2, ""):
        with pytest.raises(SystemExit) as stop:
            main([word])
        assert (stop.value.code, capsys.readouterr().out) == (code, out)
    assert main([]) == 2
    assert "verbs:" in capsys.readouterr().err


def python(script: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


def without(modules: list[str]) -> str:
    """A script's line after which these modules cannot be imported."""
    return f"import sys; sys.modules.update(dict.fromkeys({modules}))\n"


WITHOUT_BENCH = "import sys; sys.path[:] = [path for path in sys.path if not path.endswith('bench')]\n"
"""A script's line after which the other distribution is not installed."""


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
    done = python(script)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "example" in done.stdout
    assert VERBS[name].examples[0] in done.stdout
    exits = exits_of(VERBS[name])
    assert {0, 1, 2, 130} <= exits.keys()
    assert all(f"\n  {code:<4} {meaning}\n" in done.stdout for code, meaning in exits.items())


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.module.startswith("pic_")])
def test_a_verb_of_the_other_distribution_says_what_to_install(name: str) -> None:
    run = f"from sglang_pic.cli import main; sys.exit(main(['{name}', '--help']))"
    done = python(WITHOUT_BENCH + run)
    assert (done.returncode, done.stdout) == (2, "")
    said = rf"sglang-pic: error: `sglang-pic {name}` .+: pip install ./bench in the repository\n"
    assert re.fullmatch(said, done.stderr)


def test_a_generated_trace_without_the_other_distribution_says_what_to_install() -> None:
    run = f"from sglang_pic.cli import main; sys.exit(main(['census', '{GENERATED}']))"
    done = python(WITHOUT_BENCH + run)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"sglang-pic: error: gen:random.+: pip install ./bench in the repository\n", done.stderr)


def test_the_doctor_refuses_a_bad_configuration_before_it_imports_sglang() -> None:
    script = (
        "import os, sys; os.environ['SGLANG_PIC_CONFIG'] = '{\"audit_rate\": 7}'; "
        "from sglang_pic.cli import main; code = main(['doctor']); "
        "sys.exit(99 if {'torch', 'sglang'} & set(sys.modules) else code)"
    )
    done = python(script)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("sglang-pic: error: SGLANG_PIC_CONFIG: audit_rate=7")


UNREADABLE = {
    "deep": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "long number": f'{{"hidden_size": {"9" * 5_000}}}',
    "list": "[]",
    "null": "null",
    "cut": '{"hidden_size": ',
    "empty": "",
    "NaN": '{"hidden_size": NaN}',
    "no list": '{"architectures": "LlamaForCausalLM"}',
    "no names": '{"architectures": [5]}',
    "no heads": '{"num_attention_heads": 0}',
    "text": '{"num_hidden_layers": "32"}',
    "object": '{"vocab_size": {}}',
    "infinite": '{"max_position_embeddings": Infinity}',
}


def test_the_doctor_refuses_an_unreadable_model_before_it_imports_sglang(tmp_path: Path) -> None:
    for name, text in UNREADABLE.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    script = (
        "import sys; from pathlib import Path; from sglang_pic.cli import main; "
        "codes = {main(['doctor', str(folder)]) for folder in sorted(Path.cwd().iterdir())}; "
        "sys.exit(99 if {'torch', 'sglang'} & set(sys.modules) else codes.pop() if len(codes) == 1 else 98)"
    )
    done = python(script, tmp_path)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(UNREADABLE)
    for line, name in zip(said, sorted(UNREADABLE), strict=True):
        assert line.startswith(f"sglang-pic: error: {tmp_path}/{name}/config.json: ")
        assert len(line) < 400


def test_extras_are_those_of_the_package() -> None:
    """A package that is added to an extra must be asked for by the verbs that import it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[^\w-]", requirement)[0] for requirement in extras[extra]} - _FLOORS
        assert {name.replace("-", "_").removesuffix("_py") for name in names} == set(modules)


_FLOORS = {"h11"}
"""Imported by other packages only, and named for the oldest version that will do."""
MODULES = sorted({module for modules in EXTRAS.values() for module in modules})
GENERATED = "gen:random?sessions=1"
RUNS = {
    "census": ("[census]", "sglang_pic.census.table", [GENERATED]),
    "explain": ("[census]", "sglang_pic.explain.page", [GENERATED, "--out", "page.html"]),
    "fix": ("[census]", "sglang_pic.census.table", [GENERATED]),
    "skill": ("[client]", "sglang_pic.client", ["list"]),
}
"""The extra that a verb asks for, what its `run` imports, and words for it."""


@pytest.mark.parametrize("name", RUNS)
def test_verb_without_its_extra_names_the_one_to_install(name: str, tmp_path: Path) -> None:
    """Without any extra a verb ends in one line, not in a traceback."""
    extra, _, words = RUNS[name]
    run = f"from sglang_pic.cli import main; sys.exit(main({[name, *words]}))"
    done = python(without(MODULES) + run, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    needs, install = f"sglang-pic: error: `sglang-pic {name}` needs ", f"pip install '.{extra}' in the repository"
    assert re.fullmatch(rf"{needs}.+ not installed here: {re.escape(install)}\n", done.stderr)


@pytest.mark.parametrize("name", RUNS)
def test_a_verb_imports_no_module_of_an_extra_that_it_does_not_ask_for(name: str) -> None:
    done = python(without(sorted(set(MODULES) - set(VERBS[name].needs))) + f"import {RUNS[name][1]}")
    assert done.returncode == 0, done.stderr


def test_closed_pipe_is_no_traceback() -> None:
    """As in `sglang-pic --help | head -0`: the reader is gone before the first byte."""
    script = "import sys; from sglang_pic.cli import main; sys.exit(main(['--help']))"
    # Unbuffered, argparse itself would swallow the error.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, env=buffered, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize("name", ["log\x1b]0;evil\x07\x9b2J\u202e.jsonl", "log\udcff\x7f.jsonl"], ids=ascii)
@pytest.mark.parametrize(
    "words",
    [
        ["census", "LOG"],
        ["census", "--json", "LOG"],
        ["fix", "LOG", "--out", "OUT"],
        ["explain", "LOG", "--out", "OUT"],
        ["census", "LOG", "--no-such-flag=LOG"],
        ["report", "LOG"],
        ["model", "tiny-gqa", "LOG"],
    ],
    ids=lambda words: f"{words[0]} {words[1]}",
)
def test_nothing_that_a_terminal_obeys_is_printed(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of files come from archives and downloads, and texts from whoever sent a prompt."""
    log = tmp_path / name
    line = json.dumps({"messages": [{"role": "user", "content": "\x1b[2J \x9b2J \u202e" + "word " * 300}]})
    log.write_text(f"{line}\n{line}\nno line of a trace \x1b[2J\n")
    places = {"LOG": str(log), "OUT": str(tmp_path / f"out{name[3:-6]}")}
    with suppress(SystemExit), monkeypatch.context() as patch:  # argparse's
        # What pytest captures of logs is sent to another process, which takes no half characters.
        patch.setattr(logging.getLogger(), "handlers", [])
        main([re.sub("LOG|OUT", lambda found: places[found[0]], word) for word in words])
    printed = capsys.readouterr()
    assert not OBEYED.search(printed.out + printed.err)
    assert re.search(r"\\(u00|x|udc)", printed.out + printed.err)
    if "--json" in words:
        assert json.loads(printed.out)["files"][0]["file"] == str(log), "an escape of JSON, so its value is the same"


def test_a_bar_redraws_its_line_and_its_text_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    with printable_output():
        print("\r 50 % \r\x1b[A", end="", file=sys.stderr)
        sys.stdout.writelines(["a\tb\n", "\r\rc"])
    assert capsys.readouterr() == ("a\tb\n\r\\u000dc", "\r 50 % \\u000d\\u001b[A")


def test_what_a_terminal_cannot_write_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", written := io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    with printable_output():
        print("a \u2192 b \xe9", flush=True)
    assert written.buffer.getvalue() == b"a \\u2192 b \xe9\n"  # type: ignore[attr-defined]


SAMPLE = "sample:opendevin --limit-sessions 1"
Capture = pytest.CaptureFixture[str]


def refused(words: list[str], capsys: Capture) -> str:
    """The last line about words that are refused with exit code 2."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert (code, out) == (EXIT_USAGE, ""), err
    return str(err.splitlines()[-1])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["cenus", "a"], "did you mean 'census'?"),
        (["census", "a", "--tokeniser", "b"], "unrecognized arguments: --tokeniser b; did you mean '--tokenizer'?"),
        (["census", "a", "--preset", "carefu"], "did you mean 'careful'?"),
        (["compare", "a", "--modle=m", "--out", "o"], "--modle is no option; did you mean '--model'?"),
        (["skill", "lst"], "did you mean 'list'?"),
        (["skill", "list", "--extra-kye", "a"], "did you mean '--extra-key'?"),
        (["doctor", "m", "--page-size", "64"], "a lone `--`: sglang-pic doctor ... -- --page-size ..."),
        (["doctor", "m", "--crad", "h100"], "did you mean '--card'?"),
    ],
)
def test_a_word_with_a_mistake_is_answered_with_the_nearest_one(words: list[str], meant: str, capsys: Capture) -> None:
    assert refused(words, capsys).endswith(meant)


def test_a_word_like_none_gets_no_guess(capsys: Capture) -> None:
    assert "did you mean" not in refused(["census", "a", "--xyzzy"], capsys)
    assert "did you mean" not in refused(["frobnicate"], capsys)


DASH = "'-': name a file, or a folder for a run."
COMPARE = "compare sample:agents --model"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("census none.jsonl", "'none.jsonl': no such file; "),
        ("report nosuch", "'nosuch': no such folder; "),
        ("report empty", "no run in it"),
        (f"{COMPARE} nosuch --out o", "model='nosuch': no such folder; "),
        (f"{COMPARE} empty --out o", "no config.json"),
        (f"{COMPARE} model --out /proc/x", "cannot be (made|written)"),
        ("model tiny-gqa /proc/x", "cannot be (made|written)"),
        *((f"{words} -", DASH) for words in (f"explain {SAMPLE} --out", f"fix {SAMPLE} --out", "model tiny-gqa")),
        (f"{COMPARE} m --out -", DASH),
    ],
)
def test_a_file_or_folder_that_cannot_be_used_is_refused_before_anything_is_done(
    words: str, said: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert re.match(f"sglang-pic.*: error: .*{said}", refused(words.split(), capsys))
    assert sorted(os.listdir(tmp_path)) == ["empty", "model"]


def test_a_flag_that_sglang_does_not_have_is_refused_before_a_server_starts() -> None:
    with pytest.raises(ConfigError, match=r"--page-sise: SGLang has none.*did you mean '--page-size'"):
        server_flags(["--page-sise 64"])
    words = ("--page-size", "64", "--tp=2", "--no-enable-tf32-matmul", "--config", "a.yaml", "--chunked-prefill", "9")
    assert server_flags([" ".join(words[:3])], words[3:]) == words
    assert server_flags([]) == ()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(), EXIT_USAGE),
        (TraceError(), EXIT_USAGE),
        (OptionError(), EXIT_USAGE),
        (PermissionError(errno.EACCES, ""), EXIT_USAGE),
        (OSError(errno.ENOSPC, ""), EXIT_FAILED),
        (ReplayError(), EXIT_FAILED),
        (ServerError(), EXIT_FAILED),
        (BenchError(), EXIT_FAILED),
        (UnsupportedError(), EXIT_FAILED),
        (PicError(), EXIT_FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_rule_gives_each_error_its_exit_code(error: Exception, code: int) -> None:
    assert cli._exit_code(error) == code


def test_the_completion_knows_verbs_options_values_and_files() -> None:
    pytest.importorskip("shtab", reason="pip install '.[completion]'")
    command = [sys.executable, "-c", "from sglang_pic.cli import main; main(['--completion', 'bash'])"]
    script = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    asked = "; ".join(
        f"COMP_WORDS=({line}); COMP_CWORD=$(({len(line.split())}-1)); COMPREPLY=(); _shtab_sglang_pic; "
        'echo "${COMPREPLY[@]}"'
        for line in ("sglang-pic cen", "sglang-pic census --tok", "sglang-pic census --preset ca")
    )
    done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["census", "--tokenizer", "careful"]
    assert "_shtab_compgen_files" in script
    assert all(name in script for name in VERBS)


def test_without_its_library_the_completion_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['shtab'] = None; from sglang_pic.cli import main; "
        "sys.exit(main(['--completion', 'zsh']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.endswith("pip install '.[completion]' in the repository\n")
