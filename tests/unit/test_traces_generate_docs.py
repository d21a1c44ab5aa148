"""What traces/pic_traces/README.md says about the generators' options."""

from __future__ import annotations

from pathlib import Path

import pytest
from pic_traces import load
from pic_traces.generate import WORKLOADS, Option, Options, list_options

README = Path(__file__).resolve().parent.parent.parent / "traces" / "pic_traces" / "README.md"


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
    """The Markdown tables of all workloads and their options, as the README has them."""
    shared = [option for option in list_options(Options) if option.is_shared]
    lines = ["| workload | what changes, what repeats |", "|---|---|"]
    lines += [f"| `{name}` | {workload.summary} |" for name, workload in WORKLOADS.items()]
    lines += ["", "| workload | options (default) |", "|---|---|", f"| all | {listed(shared)} |"]
    for name, workload in WORKLOADS.items():
        own = [option for option in list_options(workload.kind) if option not in shared]
        lines.append(f"| `{name}` | {listed(own)} |")
    return "\n".join(lines)


def listed(options: list[Option]) -> str:
    return "<br>".join(
        f"`{option.name}`{f' ({option.default})' if option.default else ''} {option.meaning}" for option in options
    )
