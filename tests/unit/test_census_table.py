"""The table: its facts and its width, not its layout."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace
from pic_traces.source import short_name

from sglang_pic.census.lasting import Lasting, Trends, Window
from sglang_pic.census.table import WIDTH, render, render_lasting
from sglang_pic.census.tally import Census, ChangedFields, Counts, Detail, RunLengths, UpperBound
from sglang_pic.core import CoreConfig

BIG = 999_999_999


def text_counts(scale: int = 1, *, changed: int = 0) -> Counts:
    numbers = {"sessions": 4, "calls": 20, "prompt_tokens": 1000, "prefix_tokens": 600, "chunk_tokens": 300, "runs": 30}
    changes = {"calls": 3, "fields": 5, "chunk_tokens": 120, "guarded_tokens": 40}
    detail = Detail(
        tokenizer="words",
        tokenizer_exact=False,
        run_lengths=RunLengths(p10=16 * scale, p50=64 * scale, p90=512 * scale),
        chunk_tokens_same_session=240 * scale,
        chunk_tokens_other_session=60 * scale,
        chunk_tokens_by_role={"tool": 270 * scale, "user": 30 * scale, "template": 0},
        changed_fields=ChangedFields(**{name: number * changed for name, number in changes.items()}),
        upper_bound=UpperBound(window_len=64, tokens=320 * scale, tokens_behind=310 * scale),
    )
    return Counts(**{name: n * scale for name, n in numbers.items()}, new_tokens=100 * scale, detail=detail)


def block_counts() -> Counts:
    unknown = dict.fromkeys(("chunk_tokens", "new_tokens", "runs"))
    numbers = {"sessions": 0, "calls": 12_031, "prompt_tokens": BIG, "prefix_tokens": BIG // 2}
    return Counts(**numbers, **unknown, detail=Detail(note="prefix hits only"))


def rows(text: str, name: str) -> list[list[str]]:
    """The lines that begin with a name, as words."""
    return [re.split(r"\s{2,}", line.strip())[1:] for line in text.splitlines() if line.startswith(name)]


def test_facts_of_one_file() -> None:
    counts = text_counts()
    text = render(Census(files=[counts.of_file("logs/mine.jsonl.gz")], total=counts), CoreConfig())
    assert rows(text, "mine") == [
        ["4", "20", "1,000", "600", "60.0%", "300", "30.0%", "100", "10.0%"],
        ["75.0%", "1.50", "16 / 64 / 512", "80.0%", "20.0%"],
        ["tool 90.0%, user 10.0%"],
        ["320", "32.0%", "93.8%", "310", "31.0%", "96.8%"],
    ]
    assert " ".join(text.split("\n\n")[0].split()) == (
        "A prefix cache serves 60.0% of 1,000 prompt tokens. This cache would serve 30.0% more: 75.0% of what stock "
        "SGLang computes."
    )
    assert not rows(text, "all ")
    assert "approximation; see Limits in the README" in " ".join(text.split())
    assert "Tokens are words. Set --tokenizer DIR to count your model's tokens." in text


@pytest.mark.parametrize("file", ["x" * 200 + "1.jsonl", "gen:agent_meta?" + "header=250&" * 10 + "seed=1"])
def test_it_fits_a_narrow_terminal(file: str) -> None:
    counts = text_counts(999_999, changed=999_999)
    files = [counts.of_file(file), counts.of_file(file.replace("1", "2")), block_counts().of_file("b" * 60)]
    text = render(Census(files=files, total=counts), CoreConfig())
    assert max(map(len, text.splitlines())) <= WIDTH
    # Nothing of the names is lost: they go on in the next lines.
    names = "".join(line[:WIDTH].split("  ")[0] for line in text.splitlines())
    assert all(name in names for name in (short_name(file), short_name(file.replace("1", "2")), "b" * 60))


def test_pool_host_and_store_are_told_apart_and_sum_up_behind_the_warm_up() -> None:
    store = {"stock": 450, "prefix": 300, "chunk": 250, "loaded": 700}
    counted = Window(
        **{"calls": 1, "prompt_tokens": 1000, "prefix_tokens": 100, "chunk_tokens": 50},
        **{"host_prefix_tokens": 180, "host_chunk_tokens": 60},
        **{f"store_{name}_tokens": number for name, number in store.items()},
    )
    result = Lasting(
        **{"hours": 1, "pause_s": 0, "seed": 1, "sessions": 1, "servers": 4, "has_store": True, "window_s": 600},
        **{"distinct_tokens": 9000, "pool_tokens": 900, "host_tokens": 1800},
        windows=[Window(calls=1, prompt_tokens=5000), counted],
        warmup_windows=1,
        trends=Trends(recovered=None, kept=None),
    )

    def rows(**other: bool | int) -> list[list[str]]:
        lines = render_lasting(replace(result, **other)).splitlines()
        return [line.split()[2:] for line in lines if line.startswith(("stock SGLang", "this cache"))]

    assert rows() == [["10.0%", "8.0%", "27.0%", "55.0%"], ["15.0%", "9.0%", "31.0%", "45.0%"]]
    assert rows(has_store=False) == [["10.0%", "8.0%", "82.0%"], ["15.0%", "9.0%", "76.0%"]]
    assert rows(host_tokens=0) == [["10.0%", "35.0%", "55.0%"], ["15.0%", "40.0%", "45.0%"]]
    assert rows(has_store=False, host_tokens=0) == []
    assert "this cache loads 700" in render_lasting(result)
