"""The items of `make gpu` that start servers, as on a card, on servers that only answer: every figure, every start."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pic_bench import serving
from pic_bench.gpu import defaults, servers, variants
from pic_bench.gpu.record import FIGURES, ITEMS, Found, Item, Work

from sglang_pic.core import CostModel
from sglang_pic.errors import BenchError

COSTS = CostModel(computed_token_us=3.0, spliced_token_us=0.1, gap_us=40.0, floor_us=9.0)
LOG = f"""Traceback (most recent call last): SGLang does without
sglang_pic: 3 delimiters, cost {msgspec.json.encode(COSTS).decode()}, config {{}}
/site/pic_bench/probe_plugin/plugin.py:7: UserWarning: called a synchronizing CUDA operation
/site/flashinfer/prefill.py:7: UserWarning: called a synchronizing CUDA operation
"""
PROBE = {"num_gap_passes": 40, "num_replayed": 39}
AUDIT = {"num_pending": 0, "num_audited": 3}
INFO = {"max_total_tokens": 6_000, "internal_states": [{"pic": {"probe": PROBE, "audit": AUDIT}}]}


class Answers:
    """A server that serves all but the last token of a prompt from anywhere; turned rows give another distribution."""

    base_url, ready_after_s = "http://here", 12.0

    def __init__(self, log_path: Path, name: str) -> None:
        self.log_path, self.name = log_path, name
        log_path.write_text(LOG)

    def get(self, _path: str) -> str:
        return json.dumps(INFO)

    def post(self, _path: str, body: dict[str, Any]) -> dict[str, Any]:
        prompt, pic = body["input_ids"], body["sampling_params"].get("custom_params", {}).get("pic", {})
        is_wrong = "testing" in pic
        first = [[-0.1, 5, None], [-2.4, 6, None]] if not is_wrong else [[-2.4, 5, None], [-0.1, 6, None]]
        return {"output_ids": self.ids(prompt), "meta_info": {**meta(prompt), "output_top_logprobs": [first]}}

    def ids(self, prompt: list[int]) -> list[int]:
        return [sum(prompt) % 1_000]


def meta(prompt: list[int]) -> dict[str, Any]:
    known = len(prompt) - 1
    details = {"pic": known, "pic_host": known}
    numbers = {"prompt_tokens": len(prompt), "cached_tokens": known, "spec_num_correct_drafts": 3}
    return {**numbers, "cached_tokens_details": details}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Answers]:
    """The servers that were started."""
    found: list[Answers] = []

    @contextmanager
    def start(_model: str, arm: Any, _logs: Path, **_: object) -> Iterator[Answers]:
        found.append(Answers(tmp_path / f"{len(found)}.log", arm.name))
        yield found[-1]

    def stream(_url: str, body: dict[str, Any], timeout_s: float) -> Any:
        def tokens() -> Iterator[bytes]:
            for _ in range(body["sampling_params"]["max_new_tokens"]):
                time.sleep(1e-3)
                yield json.dumps({"meta_info": meta(body["input_ids"])}).encode()

        return nullcontext(tokens())

    monkeypatch.setattr(servers, "serving", start)
    monkeypatch.setattr(serving, "request", stream)
    monkeypatch.setattr(serving, "read_events", lambda answer: answer)
    dims = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(dims))
    for module in (servers, variants):
        monkeypatch.setattr(module, "prepare", lambda _name, folder, progress: tmp_path)
    used = iter(range(1_000, 2_000, 7))
    monkeypatch.setattr(defaults, "gpu_memory_mib", lambda: next(used))
    return found


def run(item: Item, folder: Path) -> Found:
    module, _, function = item.work.partition(":")
    work = Work(is_dry=False, folder=folder)
    found: Found = getattr(import_module(f"pic_bench.gpu.{module}"), function)(work)
    return found


@pytest.mark.parametrize("item", [item for item in ITEMS if item.servers], ids=lambda item: item.name)
def test_an_item_gives_its_figures_and_starts_as_many_servers_as_its_limit_is_for(
    item: Item, started: list[Answers], tmp_path: Path
) -> None:
    found = run(item, tmp_path)
    assert found.failures == []
    assert set(found.figures) == {figure.name for figure in FIGURES if figure.item == item.name}
    assert len(started) == item.servers
    assert msgspec.json.encode(found.raw)


DEFAULTS = next(item for item in ITEMS if item.name == "defaults")


def test_a_server_that_fails_leaves_what_was_measured_before(
    started: list[Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answers.post

    def fail(self: Answers, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.name == "defaults-twin":
            raise BenchError("out of memory")
        return answer(self, path, body)

    monkeypatch.setattr(Answers, "post", fail)
    found = run(DEFAULTS, tmp_path)
    assert found.failures == ["out of memory"]
    assert {"replayed", "waits", "off_equal", "start_memory"} <= set(found.figures)


def test_a_fault_counts_once_the_server_is_healthy(started: list[Answers], tmp_path: Path) -> None:
    """The log has a traceback of the start already."""
    model = servers.Model(tmp_path, (), 1_000)
    arm = servers.make_arm("pic", model)
    work = Work(is_dry=True, folder=tmp_path)

    def serve(name: str, said: str) -> None:
        with servers.sound(work, name, model, arm):
            log = started[-1].log_path
            log.write_text(log.read_text() + said)

    serve("fine", "INFO: all is well\n")
    with pytest.raises(BenchError, match="late: the server logged a fault"):
        serve("late", "CUDA error: an illegal memory access was encountered\n")
