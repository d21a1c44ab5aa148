"""All text of all pages: commands, flags, targets, modules, settings, variables, headers, files and links exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the study reads records with it")
from pic_bench.report import study

from sglang_pic.adapter.serve.headers import OPTIONS, SALT
from sglang_pic.cli import VERBS, main
from sglang_pic.core import CoreConfig
from tests.conftest import ROOT

RESULTS = ROOT / "bench" / "results"
# Names files of the projects that it has recordings of.
DATA = ROOT / "traces" / "pic_traces" / "data"
FOLDERS = (ROOT, ROOT / "sglang_pic", RESULTS, study.PAGES, ROOT / "traces" / "pic_traces")
PAGES = [path for folder in FOLDERS for path in sorted(folder.glob("*.md"))]
PAGES.append(DATA / "README.md")
# Each of their commands is one of the commit that is named beside it.
OF_OTHER_COMMITS = {ROOT / "CHANGELOG.md", RESULTS / "README.md"}
CURRENT = [page for page in PAGES if page not in OF_OTHER_COMMITS]
# Of kubectl, docker, pip, systemd, gateways, clients, other engines, and programs whose records alone are here.
OF_OTHERS = """--attack --build --control-plane-api-keys --custom-dataset-type --dump-requests-folder
--enable-log-requests --exclude-dynamic-system-prompt-sections --extra-body --find-links --from-literal
--load-restrictor --no-index --now --output-format --pass-session-id --system --upgrade --web"""
# Of responses.
ANSWERED = {f"x-pic-{name}" for name in ("spliced", "behind-change", "guarded", "inherited", "host", "reason")}
VARIABLE = re.compile(r'"(SGLANG_PIC_[A-Z_]+)"')
each_page = pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.relative_to(ROOT).as_posix())


@cache
def flags() -> set[str]:
    """Of our verbs and modules, and of SGLang's server; any of them may be cut short."""
    known = set(OF_OTHERS.split())
    for verb in VERBS:
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
            main([verb, "--help"])
        known.update(re.findall(r"--[a-z][\w-]+", out.getvalue()))
    for path in (*(ROOT / "bench").rglob("*.py"), *(ROOT / "sglang_pic").rglob("*.py")):
        known.update(re.findall(r'"(--[a-z][\w-]+)"', path.read_text()))
    server_args = pytest.importorskip("sglang.srt.server_args")
    parser = ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    return known | set(parser._option_string_actions)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def code_of(page: Path) -> Iterator[str]:
    """What stands in fences and between backticks, a line at a time."""
    text = re.sub(r"`[^`]+` (?:in a checkout of|at|of) [0-9a-f]{7,}", "", page.read_text())
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", text))


@each_page
def test_what_a_page_names_exists(page: Path) -> None:
    wrong = []
    for code in code_of(page):
        wrong += [
            f"sglang-pic {verb}" for verb in re.findall(r"^\$? ?sglang-pic ([a-z]+)\b", code) if verb not in VERBS
        ]
        wrong += [
            f"make {name}" for name in re.findall(r"^\$? ?make ([a-z][a-z-]*)", code) if name not in make_targets()
        ]
        wrong += [
            flag
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code)
            if not any(known.startswith(flag) for known in flags())
        ]
        modules = re.findall(r"python3? -m ((?:pic_|sglang_pic|tests)[\w.]*)", code)
        wrong += [name for name in modules if find_spec(name) is None]
        settings = re.findall(r"\bcore\.([a-z_]+)\b(?!\()", code)
        wrong += [f"core.{name}" for name in settings if name not in (*CoreConfig.__struct_fields__, "json", "py")]
        headers = re.findall(r"\bx-pic-[a-z-]*[a-z]\b", code)
        wrong += [name for name in headers if name not in (*OPTIONS, SALT, *ANSWERED)]
        files = re.findall(r"^(?:tests|bench|kernels|traces|sglang_pic)/[\w/.-]+\w$", code)
        wrong += [name for name in files if page.parent != DATA and not (ROOT / name).exists()]
    assert wrong == []


def test_the_architecture_names_files_that_exist() -> None:
    """Below the package, or below its adapter."""
    package = ROOT / "sglang_pic"
    named = re.findall(r"`([\w/]+\.(?:py|toml))`", (package / "README.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not any((top / name).exists() for top in (package, package / "adapter"))] == []


def test_every_command_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """On pages and in the help every `sglang-pic` has arguments that its verb takes; words in capitals are values."""
    seen: list[str] = []
    for verb in VERBS:
        monkeypatch.setattr(import_module(VERBS[verb].module), "run", lambda args: seen.append(args.verb) or 0)
    monkeypatch.setattr("sglang_pic.cli._check_needs", lambda *_: None)
    for page in CURRENT:
        for code in code_of(page):
            words = (
                shlex.split(code.removeprefix("$ sglang-pic "), comments=True) if code[:13] == "$ sglang-pic " else []
            )
            if words and "--help" not in words:
                assert main(words) == 0, f"{page}: {code}"
    for verb in VERBS.values():
        for example in verb.examples:
            assert main(shlex.split(example)[1:]) == 0, example
    assert set(seen) == set(VERBS)


def test_help_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """A block that begins with `$ sglang-pic ... --help` holds the command's whole output, word for word."""
    for page in PAGES:
        for command, printed in re.findall(
            r"^```\w*\n\$ (sglang-pic\b[^\n]*--help)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            with pytest.raises(SystemExit) as stop:
                main(shlex.split(command)[1:])
            assert stop.value.code == 0
            assert printed.rstrip() == capsys.readouterr().out.rstrip(), f"{page}: {command}"


def test_the_reference_has_every_variable() -> None:
    sources = [path for name in ("sglang_pic", "kernels", "traces", "bench") for path in (ROOT / name).rglob("*.py")]
    used = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    reference = (ROOT / "sglang_pic" / "REFERENCE.md").read_text()
    assert used == set(re.findall(r"^\| `(SGLANG_PIC_[A-Z_]+)`", reference, re.MULTILINE))
    named = {name for page in CURRENT for name in re.findall(r"\bSGLANG_PIC_[A-Z_]+\b", page.read_text())}
    assert named <= used


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            is_web = name.startswith(("http:", "https:"))
            if not is_web and not (path.exists() and (not anchor or anchor in anchors(path))):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
