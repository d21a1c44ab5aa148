"""What a prefill server tells a decode server, and the keys that requests have on the latter."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    # SGLang and what it imports warn about this machine's missing accelerators.
    warnings.simplefilter("ignore")
    utils = pytest.importorskip("sglang.srt.disaggregation.utils")
    from sglang_pic.adapter import disaggregation
    from sglang_pic.adapter.serve import scheduler

from sglang_pic.adapter.serve.auditor import Auditor
from sglang_pic.adapter.serve.options import Mode, RequestOptions
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.core import ReusePolicy

pytestmark = pytest.mark.feature("PD disaggregation")

_RECEIVED = "managers.schedule_batch.Req.__init__"


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """By the name of what they hook, the functions of both servers."""
    found: dict[str, Callable[..., Any]] = {}
    for module in (disaggregation, scheduler):
        monkeypatch.setattr(module, "hook", lambda _, target, function: found.setdefault(target, function))
    disaggregation.install_sender()
    disaggregation.install_receiver(ReusePolicy(), Mode.AUTO)
    return found


def request(options: object, **fields: Any) -> Any:
    """SGLang's request, as far as its key is made of it."""
    sampling = SimpleNamespace(custom_params={"pic": options})
    plain = {"extra_key": None, "cache_salt": None, "lora_id": None, "session": None, "rid": "r"}
    return SimpleNamespace(sampling_params=sampling, **{**plain, **fields})


@pytest.mark.parametrize(
    "fields", [{}, {"extra_key": "k", "cache_salt": "s"}, {"extra_key": "kl", "lora_id": "l"}], ids=["", "key", "lora"]
)
@pytest.mark.parametrize(
    "options", [{}, {"mode": "off"}, {"edit": "recompile"}, {"seam_tokens": 3}, {"bad": 1}], ids=str
)
def test_a_request_has_one_key_on_both_servers(
    options: object, fields: dict[str, Any], hooked: dict[str, Callable[..., Any]]
) -> None:
    here, there = request(options, **fields), request(options, **fields)
    scheduler.receive(here, Auditor(), ReusePolicy())
    hooked[_RECEIVED](None, there)
    assert there.extra_key == here.extra_key
    is_unmarked = options in ({}, {"seam_tokens": 3}) and not there.lora_id
    assert (there.extra_key == request(options, **fields).extra_key) == is_unmarked


def test_a_request_that_cannot_be_read_is_kept_apart(
    hooked: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(scheduler, "parse_options", fail)
    req = request({})
    hooked[_RECEIVED](None, req)
    assert req.extra_key == scheduler.tree_key(None, lane="off")


def test_what_was_spliced_is_told_beside_sglangs_own_numbers(hooked: dict[str, Callable[..., Any]]) -> None:
    """SGLang fills a row of its buffers for a request, which the transfer engine copies."""
    buffers = utils.MetadataBuffers(4, 8, torch.float32, 8)
    state = RequestState(RequestOptions(), num_chunk_hit=70_000, num_behind_change=300, num_guarded=20)
    req = SimpleNamespace(
        **{"metadata_buffer_index": 2, "output_ids": array("q", [7]), "cached_tokens": 70_100, "pic": state},
        **{"cached_tokens_device": 100, "cached_tokens_host": 0, "cached_tokens_storage": 0, "bootstrap_room": 9},
        **{"return_logprob": False, "return_sampling_mask": False, "hidden_states_tensor": None},
        get_mm_token_counts=lambda: (1, 2, 3),
    )
    buffers.cached_tokens.fill_(-1)
    buffers.set_buf(req)
    own = buffers.cached_tokens[2].clone()
    hooked["disaggregation.utils.MetadataBuffers.set_buf"](None, buffers, req)
    assert own[disaggregation._COUNTS].tolist() == [-1] * 3, "places that SGLang leaves empty"
    assert buffers.cached_tokens[2, :13].tolist() == own[:13].tolist()
    there = request({})
    hooked[_RECEIVED](None, there)
    committed: list[object] = []
    queue = SimpleNamespace(metadata_buffers=buffers)
    decode_req = SimpleNamespace(req=there, metadata_buffer_index=2)
    hooked["disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req"](
        lambda *each: committed.append(each), queue, decode_req
    )
    assert committed == [(queue, decode_req)]
    assert (there.pic.num_chunk_hit, there.pic.num_behind_change, there.pic.num_guarded) == (70_000, 300, 20)
    there.cached_tokens, there.cached_tokens_host, there.cached_tokens_storage = 70_100, 0, 0
    shown = hooked["managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details"](
        {"device": 100, "host": 0}, None, there
    )
    assert shown == {"device": 70_100, "host": 0, "pic": 70_000, "pic_behind_change": 300, "pic_guarded": 20}
