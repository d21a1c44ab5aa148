"""The reports render from a run folder alone and say the numbers of summary.json."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from pic_bench.compare.pairing import compare_all, summarize_arm
from pic_bench.compare.report import write_all
from pic_bench.compare.run_folder import Config, arm_folder
from pic_bench.compare.summary import ArmKind, Measured, Model, Summary, Trace
from pic_bench.environment import Environment, capture_environment
from pic_bench.out_folder import write_json
from pic_traces.records import RequestRecord, summarize

from sglang_pic.errors import BenchError
from tests.unit.html_page import Page
from tests.unit.replay_records import record, write_records


def make_run(
    folder: Path, *, arms: tuple[str, ...] = ("stock", "pic", "stock-again"), num_requests: int = 60
) -> Summary:
    """Write a run folder with seeded records, as `compare` leaves it but without reports."""
    records = {arm: _records(arm, num_requests) for arm in arms}
    summaries = {
        arm: summarize_arm(
            summarize(records[arm], trace="t", model="m", planned=num_requests),
            records[arm],
            kind=ArmKind(arm),
            ready_s=21.0,
            server_args=["--device", "cpu", *(["--radix-cache-backend", "pic"] if arm == "pic" else [])],
            pic_counters={"sglang:pic_runs_total": 41.0} if arm == "pic" else {},
        )
        for arm in arms
    }
    model = {"path": "models/smollm2", "name": "smollm2", "architecture": "LlamaForCausalLM", "dtype": "bfloat16"}
    measured = Measured(
        trace=Trace(name="opendevin <sample>", sessions=6, calls=num_requests, sha256="ab" * 32),
        model=Model(**model, num_layers=30),
        started_at="2026-01-02T03:04:05+00:00",
        finished_at="2026-01-02T03:14:05+00:00",
        arms=summaries,
    )
    summary = compare_all(measured, records)
    write_json(folder / "summary.json", summary)
    write_json(folder / "environment.json", _environment())
    write_json(folder / "config.json", Config(trace="sample:opendevin", model="models/smollm2", arms=[*arms]))
    for arm in arms:
        write_records(arm_folder(folder, arm), records[arm])
    return summary


def _environment() -> Environment:
    return msgspec.structs.replace(capture_environment(), command="sglang-pic compare x", commit="0" * 40, dirty=False)


def _records(arm: str, num_requests: int) -> list[RequestRecord]:
    """Of 2,000 tokens each; `pic` splices up to 1,200, and every fourth of its answers ends in other words."""
    records = []
    for number in range(num_requests):
        chunk = 400 * (number % 4) if arm == "pic" else 0
        end = "another end" if chunk == 400 else "the result of it"
        tokens = {"prompt_tokens": 2000, "chunk_hit_tokens": chunk, "computed_tokens": 1900 - chunk}
        text = f"<execute_bash>\nls -la /workspace/step_{number}\n</execute_bash> & then look at {end}"
        ttft = 0.05 + tokens["computed_tokens"] * 8e-4
        became: dict[str, object] = {"ttft_s": ttft, "e2e_s": ttft + 1.0}
        if number == num_requests - 1:
            reason = "prompt of 9001 tokens + 16 output tokens > context of 8192"
            became = {"status": "skipped", "ttft_s": None, "e2e_s": None, "reason": reason}
        elif number == num_requests - 2 and arm == "pic":
            became = {"status": "failed", "ttft_s": None, "e2e_s": None, "error": "HTTP 500"}
        session, key = f"session-{number // 10}", f"key-{number}"
        records.append(record(number % 10, session_id=session, prompt_key=key, output_text=text, **tokens, **became))
    return records


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """A run with its reports, for tests that only read, and its summary."""
    folder = tmp_path_factory.mktemp("reported")
    summary = make_run(folder)
    write_all(folder)
    return folder, summary


def test_page_and_drawing_are_self_contained_and_well_formed(reported: tuple[Path, Summary]) -> None:
    text = (reported[0] / "report.html").read_text("utf8")
    page = Page(text)
    assert page.fetched == []
    assert page.tags.count("svg") == 1
    assert not re.search(r"url\(|@import", text)
    assert "<sample>" not in text, "the trace's name must be escaped"
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(drawing)
    alone = ET.fromstring((reported[0] / "report.svg").read_text("utf8"))
    assert alone.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme" in (alone.find("{http://www.w3.org/2000/svg}style").text or "")  # type: ignore[union-attr]


@pytest.mark.parametrize("arms", [("stock",), ("stock", "pic"), ("stock", "pic-off"), ("stock", "stock-again")])
def test_every_choice_of_arms_renders(tmp_path: Path, arms: tuple[str, ...]) -> None:
    make_run(tmp_path, arms=arms, num_requests=12)
    write_all(tmp_path)
    text = (tmp_path / "report.md").read_text("utf8")
    assert ("The noise floor was not measured" in text) == ("stock-again" not in arms)


def test_arms_are_compared_with_stock_and_the_floor_is_stock_without_a_cache(tmp_path: Path) -> None:
    summary = make_run(tmp_path, arms=("pic", "stock", "stock-again", "stock-cold"), num_requests=12)
    assert [(pair.baseline, pair.arm) for pair in summary.comparisons] == [
        ("stock", arm) for arm in ("pic", "stock-again", "stock-cold")
    ]
    assert summary.paired == summary.comparisons[0]
    assert summary.floor == summary.comparisons[2]


def test_a_run_without_answers_renders(tmp_path: Path) -> None:
    """A trace whose every prompt is too long still ends with a report that says so."""
    make_run(tmp_path, num_requests=1)
    write_all(tmp_path)
    text = (tmp_path / "report.md").read_text("utf8")
    assert "there is nothing to compare" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="sglang-pic compare --out"):
        write_all(tmp_path)
