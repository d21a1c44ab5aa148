"""The seeded generators: what repeats, what changes, how long it is, what is refused, what the README says of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys

import msgspec
import pytest
from pic_generate import WORKLOADS, Option, Options, list_options
from pic_traces import Call, load
from pic_traces.errors import TraceError

from tests.conftest import ROOT

SMALL = {
    "agent_meta": "header=60&body=200&calls=4&sessions=2",
    "sysvar": "before=300&after=100&calls=4&sessions=2",
    "compact": "system=100&every=5&keep=2&calls=12&sessions=2",
    "tool_variants": "tools=6&tool=60&system=50&calls=8&sessions=2",
    "reorder": "count=4&length=100&calls=4&sessions=2",
    "random": "prompt=100&sessions=3&calls=2",
}
"""Every workload, as small as its shape allows."""

SPECS = [
    *(f"gen:{name}?{query}" for name, query in SMALL.items()),
    "gen:tool_variants?history=kept&tools=6&tool=60&calls=8&sessions=2",
]


def all_calls(spec: str) -> list[Call]:
    """Every call of a spec, session after session."""
    return [call for session in load(spec) for call in session.calls()]


def digest(value: object) -> str:
    """A hash of everything in a value, the order of keys included."""
    return hashlib.sha256(json.dumps(msgspec.to_builtins(value)).encode()).hexdigest()[:16]


def test_another_process_with_another_hash_seed_writes_the_same() -> None:
    code = (
        "import sys, msgspec\n"
        "from pic_traces import load\n"
        "sys.stdout.buffer.write(msgspec.json.encode([list(load(spec)) for spec in sys.argv[1:]]))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4321"}
    command = [sys.executable, "-c", code, *SPECS]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert done.stdout == msgspec.json.encode([list(load(spec)) for spec in SPECS])


TEXTS = {
    "agent_meta?header=50&body=300&calls=5&sessions=2&seed=7": "a051e69a9a2a7017",
    "agent_meta?header=1000&jitter=0&body=300&calls=3&sessions=1": "140d59d248ed6501",
    "agent_meta?sessions=1": "ef820fac07309e60",
    "sysvar?before=1000&after=400&calls=6&sessions=2": "df699c485138f14c",
    "compact?every=6&keep=2&calls=20&sessions=1&summary=100&turn=30&answer=50": "743f267cd8bb3a91",
    "tool_variants?sessions=1": "5af256f6c1b8a4a3",
    "tool_variants?history=kept&tools=5&calls=4&sessions=1": "c886d55015db6e20",
    "reorder?count=4&calls=4&sessions=3": "3e84e1f96c8025fd",
    "reorder?count=2&length=60&calls=6&sessions=1": "89533f8ad1e6497e",
    "random": "c2bfb0e3ea0fe811",
}
"""Every choice of every workload, and a digest of its calls."""


@pytest.mark.parametrize("spec", TEXTS)
def test_texts_stay_as_they_are(spec: str) -> None:
    """Results in bench/results were measured on these texts, and the README says what repeats in them."""
    calls = [[call.messages, call.tools, call.completion, call.agent] for call in all_calls(f"gen:{spec}")]
    assert digest(calls) == TEXTS[spec]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gen:nothing", r"no generator 'nothing'; allowed are\n  gen:agent_meta: a header that"),
        ("gen:agent_meta?headers=3", "unknown option 'headers'; allowed are header, jitter, body"),
        ("gen:agent_meta?jitter=1.5", r"jitter='1\.5': must be a number between 0 and 1"),
        (
            "gen:tool_variants?history=all",
            "history='all': must be one of none, kept; none is the default",
        ),
        (
            "gen:random?tokenizer=/no",
            r".*/no/tokenizer\.json does not exist; a folder with a tokenizer\.json is expected",
        ),
        ("gen:compact?every=40", "every=40: must be less than calls=40, or nothing is compacted"),
        ("gen:compact?every=9&keep=8", "keep=8: must be 7 or less with every=9"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(TraceError, match=rf"^{re.escape(spec)}: {message}"):
        load(spec)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_whole_number_has_a_limit_that_holds(name: str) -> None:
    for option in list_options(WORKLOADS[name].kind):
        if limit := re.fullmatch(r"a whole number, (\d+) or more", option.allowed):
            with pytest.raises(TraceError, match=rf"{option.name}='{int(limit[1]) - 1}': must be {option.allowed}"):
                load(f"gen:{name}?{option.name}={int(limit[1]) - 1}")


README = ROOT / "traces" / "pic_traces" / "README.md"


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_catalogue_describes_every_option(name: str) -> None:
    options = list_options(WORKLOADS[name].kind)
    assert {option.name for option in options} == set(WORKLOADS[name].kind.__struct_fields__)
    assert all(option.meaning for option in options)
    for option in options:
        if option.default:
            next(iter(load(f"gen:{name}?{option.name}={option.default}")))


def test_the_readme_has_the_tables_of_the_catalogue() -> None:
    """Where this fails, put what it shows into the README."""
    wanted = describe_workloads()
    assert wanted in README.read_text(), wanted


def describe_workloads() -> str:
    """Two Markdown tables as the README has them: what changes in each workload, and its options."""
    shared = [option for option in list_options(Options) if option.is_shared]
    lines = ["| workload | what changes, what repeats |", "|---|---|"]
    lines += [f"| `{name}` | {workload.summary} |" for name, workload in WORKLOADS.items()]
    lines += ["", "| workload | options (default) |", "|---|---|", f"| all | {listed(shared)} |"]
    for name, workload in WORKLOADS.items():
        own = [option for option in list_options(workload.kind) if option not in shared]
        lines.append(f"| `{name}` | {listed(own)} |")
    return "\n".join(lines)


def listed(options: list[Option]) -> str:
    return ", ".join(f"`{option.name}`{f' ({option.default})' if option.default else ''}" for option in options)
