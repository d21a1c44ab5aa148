"""Writes the tables of `REFERENCE.md` and `CLI.md`, versions and features of `OPERATE.md`, from the code.

`python -m pic_bench.pages.reference` (`make reference`). The text around the tables stands in the page itself.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Final

import msgspec

import sglang_pic
from pic_bench.pages.page_tables import fill_in, table
from sglang_pic.adapter.features import pins, state_checkpoints, tenants
from sglang_pic.adapter.features.audit import audit_metrics
from sglang_pic.adapter.serve import account, faults, forward, modes, planning, publish, second_pass, strip
from sglang_pic.adapter.serve.fallback import REASONS
from sglang_pic.adapter.serve.options import SETTINGS
from sglang_pic.adapter.sglang.contract import BUILT_FOR
from sglang_pic.adapter.startup import certified, self_test
from sglang_pic.adapter.support import SUPPORT, Area, Level, Support
from sglang_pic.cli import VERBS
from sglang_pic.config import PicConfig
from sglang_pic.settings import Setting, settings_of

PAGE: Final = Path(sglang_pic.__file__).with_name("REFERENCE.md")
OPERATE: Final = PAGE.with_name("OPERATE.md")
CLI: Final = PAGE.with_name("CLI.md")
_ROOT: Final = PAGE.parent.parent
_MATRIX: Final = "REFERENCE.md#what-is-tested-admitted-and-refused"
_NUMBER: Final = re.compile("^an? (integer|number)( from)? ")

METRICS: Final = (
    *account.METRICS,
    *planning.METRICS,
    *forward.METRICS,
    *second_pass.METRICS,
    *publish.METRICS,
    *tenants.METRICS,
    *state_checkpoints.METRICS,
    *faults.METRICS,
    *modes.METRICS,
    *pins.METRICS,
    *strip.METRICS,
    *self_test.METRICS,
    *certified.METRICS,
    *audit_metrics.METRICS,
)
"""All that a server can export."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages' tables anew."""
    parser = argparse.ArgumentParser(prog="python -m pic_bench.pages.reference", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    for page in (PAGE, OPERATE, CLI):
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page, file=sys.stderr)
    return 0


def render(page: str) -> str:
    """The page with the tables that the code gives today.

    Raises:
        KeyError: the page names a table that there is no code for.
    """
    return fill_in(page, lambda name: _TABLES[name]())


def _request_options() -> str:
    return _listed({_code(s.name): s.allowed for s in SETTINGS.values()})


def _server_options() -> str:
    named = {}
    for s in settings_of(PicConfig).values():
        allowed = f"; {_NUMBER.sub('', s.allowed)}" if s.allowed else ""
        named[f"`{s.name}` (`{_json(s)}`{allowed})"] = s.description
    return _listed(named)


def _metrics() -> str:
    named = {f"{_code(m.name)} ({m.kind.value}{f', by `{m.label}`' if m.label else ''})": m.help for m in METRICS}
    return _listed(named)


def _labels() -> str:
    """A list of each label's values; metrics with the same ones share it."""
    named: dict[str, list[str]] = {}
    for metric in METRICS:
        if metric.values and metric is not account.FALLBACKS:
            values = _listed({_code(value): text for value, text in metric.values.items()})
            named.setdefault(values, []).append(f"`{metric.label}` of `{metric.name}`")
    return "\n".join(f"{', '.join(names)}:\n\n{values}" for values, names in named.items())


def _reasons() -> str:
    reasons = sorted(REASONS, key=lambda reason: reason.value)
    return _listed({_code(reason.value): reason.description for reason in reasons})


def _listed(meanings: Mapping[str, str]) -> str:
    return "".join(f"- {name}: {meaning}\n" if meaning else f"- {name}\n" for name, meaning in meanings.items())


def _support() -> str:
    """The entries of each area by status, those with one reason in a line; OPERATE.md has versions and packages."""
    shown = [entry for entry in SUPPORT if entry.area not in (Area.SGLANG, Area.PACKAGE)]
    entries = sorted(shown, key=lambda entry: (_position(entry.area), _position(entry.level)))
    parts = []
    for area, of_area in groupby(entries, key=lambda entry: entry.area):
        lines = [f"### {area.value[:1].upper()}{area.value[1:]}\n"]
        for status, found in groupby(of_area, key=lambda entry: entry.level.shown):
            named: dict[str, list[str]] = {}
            for entry in found:
                named.setdefault(_why(entry), []).append(_named(entry))
            lines.append(f"{status[:1].upper()}{status[1:]}:\n")
            lines.append(_listed({", ".join(names): why for why, names in named.items()}))
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _versions() -> str:
    """The versions that the tests passed with: the pinned packages, and pip's choice, by the changelog."""
    row = _only("CHANGELOG.md", rf"^\| ({re.escape(BUILT_FOR)} with all its packages \|.*) \|$").split(" | ")
    _, _, passed, failed, skipped, on = row
    torch, triton = _only("Makefile", r"^TORCH_VERSION := (.+)$"), _only("requirements-cpu.txt", r"^triton==(.+)$")
    brought = _only("CHANGELOG.md", r"^\*With all its packages\*: (torch \S+, triton \S+) ")
    rows = [
        (f"torch {torch}, triton {triton}", "all, with every commit"),
        (f"{brought}: what pip brings", f"{int(passed):,}; {failed} failed, {skipped} skipped ({on})"),
    ]
    return table((f"SGLang {BUILT_FOR} with", "tests that passed"), rows)


def _only(name: str, pattern: str) -> str:
    """The group of the one place in a file of the repository that a pattern fits."""
    (found,) = re.findall(pattern, (_ROOT / name).read_text("utf8"), re.MULTILINE)
    return str(found)


def _features() -> str:
    """The entries of the matrix that limit users of stock SGLang, in a few lines for OPERATE.md."""
    named: dict[Level, dict[str, None]] = {level: {} for level in Level}
    for entry in SUPPORT:
        if entry.feature or (entry.fallback and entry.path):
            named[entry.level][entry.feature or entry.what] = None
    said = {
        Level.FALLS_BACK: "Computed as usual, and counted by reason",
        Level.PREFIX_ONLY: "Prefix only",
        Level.REFUSED: "Refused at start-up",
        Level.ADMITTED: "Not run",
    }
    lists = (f"{text}: {', '.join(named[level])}." for level, text in said.items() if named[level])
    bullet = f"- {' '.join(lists)} [The matrix]({_MATRIX}) has what works, and why."
    return fill(bullet, 160, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _verbs() -> str:
    """What each verb is for; `--help` has its arguments, examples and exit codes."""
    return _listed({_code(name): f"{verb.help}." for name, verb in VERBS.items()})


def _named(entry: Support) -> str:
    return f"{entry.feature}: `{entry.what}`" if entry.feature and entry.what.startswith("--") else _code(entry.what)


def _why(entry: Support) -> str:
    """Empty for what is refused by the layout of a class or of ranks: the line that stops the start says why."""
    if entry.level is Level.REFUSED and entry.area in (Area.POOL, Area.TOPOLOGY):
        return ""
    return f"counted under `{entry.fallback}`" if entry.fallback else entry.reason


def _code(what: str) -> str:
    """Flags and names of classes as code."""
    return f"`{what}`" if re.fullmatch(r"--[\w-]+|[\w:]+", what) else what


def _position(member: object) -> int:
    return list(type(member)).index(member)  # type: ignore[call-overload,no-any-return]


def _json(setting: Setting) -> str:
    return "{}" if setting.default is msgspec.NODEFAULT else msgspec.json.encode(setting.default).decode()


_TABLES: Final[dict[str, Callable[[], str]]] = {
    "request-options": _request_options,
    "server-options": _server_options,
    "metrics": _metrics,
    "labels": _labels,
    "reasons": _reasons,
    "support": _support,
    "versions": _versions,
    "features": _features,
    "verbs": _verbs,
}


if __name__ == "__main__":
    raise SystemExit(main())
