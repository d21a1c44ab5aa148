"""What a prefill server tells a decode server, and the keys that requests have on the latter."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pic.adapter.features import disaggregation
from sglang_pic.adapter.serve import frontend
from sglang_pic.adapter.serve import receive as reception
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.core import ReusePolicy
from sglang_pic.errors import ConfigError
from tests.helpers.builders import hooks_of, request, request_state

pytestmark = pytest.mark.feature("PD disaggregation")

_ASKED, _RECEIVED = "after Req.build_rebootstrap_payload", "after Req.__init__"
_COMMITTED, _SENT = "around DecodeTransferQueue._commit_transfer_to_req", "after MetadataBuffers.set_buf"


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """By the name of what they hook, the functions of both servers."""
    found = hooks_of(monkeypatch, disaggregation, reception)
    monkeypatch.setattr(disaggregation, "disaggregation_mode", lambda _: "prefill")
    disaggregation.make_sender(None, None)  # type: ignore[arg-type]
    disaggregation.install_receiver(ReusePolicy(), Modes())
    return found


_EACH_KEY = pytest.mark.parametrize(
    "fields", [{}, {"extra_key": "k", "cache_salt": "s"}, {"extra_key": "kl", "lora_id": "l"}], ids=["", "key", "lora"]
)
_EACH_LANE = pytest.mark.parametrize(
    "options", [{}, {"mode": "off"}, {"edit": "recompile"}, {"edit": "notes"}, {"seam_tokens": 3}, {"bad": 1}], ids=str
)


@_EACH_KEY
@_EACH_LANE
def test_a_request_has_one_key_on_both_servers(
    options: object, fields: dict[str, Any], hooked: dict[str, Callable[..., Any]]
) -> None:
    here, there = request(asked=options, **fields), request(asked=options, **fields)
    reception.receive(here, Features(), ReusePolicy(), Modes())
    hooked[_RECEIVED](None, there)
    assert there.extra_key == here.extra_key
    is_unmarked = options in ({}, {"edit": "notes"}, {"seam_tokens": 3}) and not there.lora_id
    assert (there.extra_key == request(asked=options, **fields).extra_key) == is_unmarked


@_EACH_KEY
@_EACH_LANE
def test_a_prompt_is_computed_again_where_its_rows_are(
    options: dict[str, object], fields: dict[str, Any], hooked: dict[str, Callable[..., Any]]
) -> None:
    """SGLang's own request for it, after new weights, as the prefill server's front end and scheduler read it."""
    req = request(asked={**options, "pin": "p", "skills": "near"} if "bad" not in options else options, **fields)
    hooked[_RECEIVED](None, req)
    sampling = SamplingParams(max_new_tokens=9, temperature=0.5, custom_params=req.sampling_params.custom_params)
    plain = dict.fromkeys(("bootstrap_port", "bootstrap_room", "priority", "routing_key", "disagg_prefill_dp_rank"), 7)
    req = SimpleNamespace(**{**vars(req), **plain, "bootstrap_host": "h", "sampling_params": sampling})
    req.origin_input_ids, req.output_ids = array("q", [1, 2]), array("q", [3])
    sent = Req.build_rebootstrap_payload(req)
    asked = GenerateReqInput(**json.loads(json.dumps(hooked[_ASKED](sent, req))))
    manager = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend="pic"))
    if req.lora_id:
        with pytest.raises(ConfigError, match="extra_key"):  # SGLang does not name the adapter
            frontend._validate(manager, asked)
        return
    frontend._validate(manager, asked)
    assert asked.input_ids == [1, 2, 3]
    given = asked.sampling_params.pop("custom_params")
    assert asked.sampling_params == sent["sampling_params"]
    there = request(asked=given["pic"], extra_key=asked.extra_key, cache_salt=asked.cache_salt)
    reception.receive(there, Features(), ReusePolicy(), Modes())
    assert (there.extra_key, there.cache_salt) == (req.extra_key, req.cache_salt)
    assert there.pic.options == msgspec.structs.replace(req.pic.options, pin=None)


def test_a_request_that_cannot_be_read_is_kept_apart(
    hooked: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(reception, "parse_options", fail)
    req = request(asked={})
    hooked[_RECEIVED](None, req)
    assert req.extra_key == reception.tree_key(None, lane="off")


def test_what_was_spliced_is_told_beside_sglangs_own_numbers(hooked: dict[str, Callable[..., Any]]) -> None:
    """SGLang fills a row of its buffers for a request, which the transfer engine copies."""
    buffers = utils.MetadataBuffers(4, 8, torch.float32, 8)
    counts = {"chunk_hit": 70_000, "behind_change": 300, "guarded": 20, "inherited": 90}
    state = request_state(**counts)
    req = SimpleNamespace(
        **{"metadata_buffer_index": 2, "output_ids": array("q", [7]), "cached_tokens": 70_100, "pic": state},
        **{"cached_tokens_device": 100, "cached_tokens_host": 0, "cached_tokens_storage": 0, "bootstrap_room": 9},
        **{"return_logprob": False, "return_sampling_mask": False, "hidden_states_tensor": None},
        multimodal_inputs=None,
        session=None,
        get_mm_token_counts=lambda: (1, 2, 3),
    )
    buffers.cached_tokens.fill_(-1)
    buffers.set_buf(req)
    own = buffers.cached_tokens[2].clone()
    hooked[_SENT](None, buffers, req)
    assert own[disaggregation._COUNTS].tolist() == [-1] * 5, "places that SGLang leaves empty"
    assert buffers.cached_tokens[2, :11].tolist() == own[:11].tolist()
    there = request(asked={})
    hooked[_RECEIVED](None, there)
    there.skip_radix_cache_insert = False
    committed: list[object] = []
    queue = SimpleNamespace(metadata_buffers=buffers)
    decode_req = SimpleNamespace(req=there, metadata_buffer_index=2)
    hooked[_COMMITTED](lambda *each: committed.append(each), queue, decode_req)
    assert committed == [(queue, decode_req)]
    assert {name: getattr(there.pic.counts, name) for name in counts} == counts
    refused = request(asked={})
    hooked[_RECEIVED](None, refused)
    hooked[_COMMITTED](
        lambda _, each: setattr(each.req, "finished_reason", "the row is another request's"),
        queue,
        SimpleNamespace(req=refused, metadata_buffer_index=2),
    )
    assert refused.pic.counts.chunk_hit == 0
    there.cached_tokens, there.cached_tokens_host, there.cached_tokens_storage = 70_100, 0, 0
    details = hooked["after SchedulerOutputStreamer.get_cached_tokens_details"]
    shown = details({"device": 100, "host": 0}, None, there)
    ours = {"pic": 70_000, "pic_behind_change": 300, "pic_guarded": 20, "pic_inherited": 90}
    assert shown == {"device": 70_100, "host": 0, **ours}


@pytest.mark.parametrize("was_apart", [True, False], ids=["apart", "spliced"])
@pytest.mark.parametrize("is_apart", [True, False], ids=["apart there", "not there"])
def test_spliced_rows_stay_out_of_a_decode_servers_lane_of_requests_that_opted_out(
    was_apart: bool, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator switches one server after the other: only one of them may have switched when a request arrives."""
    here, there = Modes(), Modes()
    here.is_on, there.is_on = not was_apart, not is_apart
    found = hooks_of(monkeypatch, disaggregation, reception)
    disaggregation.install_receiver(ReusePolicy(), there)
    sent, received = request(asked={}, metadata_buffer_index=2), request(asked={}, skip_radix_cache_insert=False)
    reception.receive(sent, Features(), ReusePolicy(), here)
    found[_RECEIVED](None, received)
    assert (received.extra_key == reception.tree_key(None, lane="off")) == is_apart
    sent.pic.counts.chunk_hit = 0 if was_apart else 200
    queue = SimpleNamespace(metadata_buffers=utils.MetadataBuffers(4, 8, torch.float32, 8))
    decode_req = SimpleNamespace(req=received, metadata_buffer_index=2)
    # A stock prefill server sends none of our numbers.
    found[_COMMITTED](lambda *_: None, queue, decode_req)
    assert not received.skip_radix_cache_insert
    disaggregation._send_counts(None, queue.metadata_buffers, sent)
    found[_COMMITTED](lambda *_: None, queue, decode_req)
    assert received.skip_radix_cache_insert == (is_apart and not was_apart)
    assert received.pic.counts.chunk_hit == sent.pic.counts.chunk_hit
