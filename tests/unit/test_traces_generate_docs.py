"""What traces/pic_traces/README.md says about the generators: their options, and what repeats in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from pic_traces import load
from pic_traces.generate import WORKLOADS, Option, Options, list_options, partition_shift

from sglang_pic.census.prefix_tree import PrefixTree
from sglang_pic.census.windows import WindowSearch
from sglang_pic.core import as_tokens

README = Path(__file__).resolve().parent.parent.parent / "traces" / "pic_traces" / "README.md"

SPLIT_SPECS = [
    *partition_shift(),
    *(f"gen:{name}" for name in WORKLOADS if name != "agent_meta"),
    "gen:tool_variants?place=start&history=kept",
    "gen:reorder?items=tools&count=40&length=150",
]


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


def test_the_readme_says_what_an_unlimited_cache_finds() -> None:
    """Where this fails because a text was changed on purpose, put what it shows into the README."""
    lines = ["| | calls | words a call | prefix | shifted | new |", "|---|--:|--:|--:|--:|--:|"]
    splits = {spec: split(spec) for spec in SPLIT_SPECS}
    for spec, (num_calls, *parts) in splits.items():
        total = sum(parts)
        shares = " | ".join(f"{part / total:.1%}".replace("%", " %") for part in parts)
        lines.append(f"| `{spec.removeprefix('gen:')}` | {num_calls} | {total // (num_calls - 1):,} | {shares} |")
    table = "\n".join(lines)
    # What Irminsul reports of its system variable; its figures leave no room for new text.
    _, prefix, shifted, _ = splits["gen:sysvar"]
    assert prefix / (prefix + shifted) == pytest.approx(0.737, abs=0.01)
    assert table in README.read_text(), table


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


def split(spec: str) -> tuple[int, int, int, int]:
    """Number of calls; words in the longest known prefix, in known windows elsewhere, and the rest, without call 1."""
    vocabulary: dict[str, int] = {}
    known: dict[str, list[int]] = {}
    tree, windows = PrefixTree(), WindowSearch()
    totals = np.zeros(3, np.int64)

    def encode(text: str) -> list[int]:
        if text not in known:
            pieces = re.findall(r"[^\W_]+|[^\w\s]", text)
            known[text] = [vocabulary.setdefault(piece, len(vocabulary)) for piece in pieces]
        return known[text]

    calls = [call for session in load(spec) for call in session.calls()]
    for number, call in enumerate(calls):
        assert call.completion is not None
        prompt: list[int] = []
        for place, message in enumerate(call.messages):
            prompt += encode(f"<{message['role']}>") + encode(str(message["content"]))
            # Most chat templates show the tools at the end of the system message.
            prompt += encode(json.dumps(message.get("tool_calls") if place else call.tools))
        prompt += encode("<assistant>")
        answer = encode(str(call.completion["content"])) + encode(json.dumps(call.completion.get("tool_calls")))
        path = as_tokens([*prompt, *answer])
        prefix = tree.resident_len(path[: len(prompt)])
        shifted = windows.observe(path, prompt_len=len(prompt), prefix_len=prefix).num
        tree.insert(path, number)
        if number:
            totals += [prefix, shifted, len(prompt) - prefix - shifted]
    return (len(calls), *(int(part) for part in totals))  # type: ignore[return-value]
