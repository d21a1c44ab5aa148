"""Start-up's passes run where SGLang's own will, so that the memory they leave to the allocator is used again, and what
start-up bounds by the server's chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from sglang_pic.adapter import factory, server_info, support
from sglang_pic.adapter.features import images
from sglang_pic.adapter.features.hicache import host_tier
from sglang_pic.adapter.features.hicache.host_tier import HostTier
from sglang_pic.adapter.serve import receive
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.startup import live_model, self_test
from sglang_pic.config import PicConfig
from sglang_pic.core import CostModel


class Stream:
    def __init__(self, name: str, device: Device) -> None:
        self.name, self._device = name, device

    def wait_stream(self, other: Stream) -> None:
        self._device.events.append(f"{self.name} waits for {other.name}")


class Device:
    """A module like `torch.cuda` that notes what happens on which stream."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = Stream("default", self)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty_cache(self) -> None:
        self.events.append("all is given back")

    def run(self, what: str) -> Any:
        """A stand-in for something that runs passes."""

        def passes(*_: object, **__: object) -> Any:
            self.events.append(f"{what} on {self.current.name}")
            return MagicMock(cost=None)

        return passes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def around(*passes: str) -> list[str]:
    inside = [f"{each} on forward" for each in passes]
    return ["forward waits for default", *inside, "default waits for forward", "all is given back"]


def test_every_pass_of_start_up_runs_on_the_forward_stream(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    runner = SimpleNamespace(device="cuda", forward_stream=Stream("forward", device))
    ctx = MagicMock(tp_worker=SimpleNamespace(model_runner=runner), tp_group=None)
    splicer = MagicMock(**{"view.index": (), "view.index_rows": (), "view.windows": None})
    live = MagicMock(runner=runner, splicer=splicer, drafts=[], delimiters=())
    costs = CostModel(computed_token_us=3.0, spliced_token_us=0.1, gap_us=40.0)
    shared = MagicMock(features=Features(), config=PicConfig(audit_rate=0), labels=None)

    def calibration(*_: object) -> CostModel:
        device.run("calibration")()
        return costs

    names = ("ForwardPath", "Planning", "ContentIndex", "create_unified_radix_cache")
    for module, stubs in {
        factory: {
            "load_config": lambda: PicConfig(audit_rate=0),
            "metric_labels": lambda _: None,
            "read_live_model": lambda *_: live,
            "check_live_rows": device.run("checks"),
            "read_costs": calibration,
            "load_loops": lambda: True,
            "apply_hooks": lambda: None,
            "FEATURES": (HostTier.make,),
            "certify": lambda *_: None,
            "get_parallel": lambda: SimpleNamespace(dp_rank=None),
            **dict.fromkeys(names, MagicMock()),
            "Stations": lambda *_, **__: shared,
        },
        support: {
            "prefix_only": lambda _: "",
            "check_support": lambda *_: None,
            "check_features": lambda _: (),
            "warn_of_changes": lambda *_: None,
            "disaggregation_mode": lambda _: "null",
            "default_mode": lambda _: None,
        },
        images: {"make": lambda *_: None},
        host_tier: {
            **dict.fromkeys(("view_host_pool", "Fetcher", "DraftsOnHost"), MagicMock()),
            "calibrate_fetch": lambda *_: float(device.run("fetches")() is None),
        },
        self_test: {"run_self_test": device.run("self-test"), "log_result": lambda *_: None},
        server_info: {"install": lambda *_: None},
        receive: {"install": lambda *_: None},
    }.items():
        for name, stub in stubs.items():
            monkeypatch.setattr(module, name, stub)
    factory.create_cache(ctx)
    assert device.events == [*around("checks", "calibration"), *around("fetches"), *around("self-test")]


def test_a_batch_is_bounded_where_a_draft_gets_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(chunk: int | None, *, is_multimodal: bool) -> int | None:
        monkeypatch.setattr(live_model, "get_schedule", lambda: SimpleNamespace(chunked_prefill_size=chunk))
        return live_model.max_extend(MagicMock(**{"model_config.is_multimodal": is_multimodal}))

    assert (most(8_192, is_multimodal=True), most(8_192, is_multimodal=False)) == (16_384, None)
    assert {most(chunk, is_multimodal=True) for chunk in (None, -1)} == {None}, "SGLang does not cut prompts either"
