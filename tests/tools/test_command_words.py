"""Words that the command line does not know: the nearest one is named, and what cannot be used is refused at once."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pic_bench.server_flags import server_flags
from pic_traces.errors import OptionError, ReplayError, TraceError

from sglang_pic import cli
from sglang_pic.cli import EXIT_FAILED, EXIT_USAGE, VERBS, main
from sglang_pic.errors import BenchError, ConfigError, PicError, ServerError, UnsupportedError

SAMPLE = ["sample:opendevin", "--limit-sessions", "1"]
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


@pytest.mark.parametrize(
    "words",
    [
        ["explain", *SAMPLE, "--out", "-"],
        ["fix", *SAMPLE, "--out", "-"],
        ["compare", "sample:agents", "--model", "m", "--out", "-"],
        ["model", "tiny-gqa", "-"],
    ],
    ids=lambda words: words[0],
)
def test_no_file_or_folder_is_called_by_the_sign_of_stdout(
    words: list[str], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'-': name a file, or a folder for a run." in refused(words, capsys)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "sample:agents", "--model", "MODEL", "--out", "/proc/x"],
        ["model", "tiny-gqa", "/proc/x"],
        ["compare", "sample:agents", "--model", "EMPTY", "--out", "o"],
        ["report", "EMPTY"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_folder_that_cannot_be_used_is_one_line(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    for name in ("MODEL", "EMPTY"):
        (tmp_path / name).mkdir()
    (tmp_path / "MODEL" / "config.json").write_text("{}")
    said = refused([str(tmp_path / word) if word in ("MODEL", "EMPTY") else word for word in words], capsys)
    assert re.match("sglang-pic: error: .*(cannot be (made|written)|no config.json|no run in it)", said)


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
