"""Requests that are computed as usual, and counted by reason."""

from __future__ import annotations

import re
import warnings
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

with warnings.catch_warnings():
    # SGLang and what it imports warn about this machine's missing accelerators.
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache")
    from sglang_pic.adapter.serve.cache import PicRadixCache
    from sglang_pic.adapter.serve.scheduler import tree_key

from sglang_pic.adapter.serve.accounting import REASONS, Fallback, Metrics
from sglang_pic.adapter.serve.options import Mode, RequestOptions
from sglang_pic.adapter.serve.state import PendingSplice, RequestState
from sglang_pic.adapter.support import max_sequences
from sglang_pic.config import PicConfig
from sglang_pic.core import DropReason, Plan, PlanOptions, Reason
from sglang_pic.errors import UnsupportedError


class Counts(Metrics):
    """Keeps the reasons instead of exporting them."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reasons: list[Reason] = []

    def count_fallback(self, reason: Reason, count: int = 1) -> None:
        self.reasons += [reason] * count


class Planned(Exception):
    """The index was asked for a plan."""


class Index:
    """Stands where the chunk index does; keeps what it was asked with."""

    options: PlanOptions

    def plan(self, *_: object, options: PlanOptions, **__: object) -> None:
        self.options = options
        raise Planned


def request(options: RequestOptions, **fields: Any) -> Any:
    """SGLang's request of 300 tokens, as far as the cache reads it."""
    tokens = array("q", range(300))
    plain: dict[str, Any] = {
        **{"input_embeds": None, "positional_embed_overrides": None, "multimodal_inputs": None, "lora_id": None},
        **{"return_logprob": False, "logprob_start_len": -1, "return_hidden_states": False, "session": None},
        **{"multi_item_delimiter_indices": None, "token_indices_to_pool": None, "retracted_stain": False},
        **{"origin_input_ids": tokens, "full_untruncated_fill_ids": tokens, "prefix_len": 0, "extend_end": 300},
        **{"extra_key": None, "cache_salt": None, "cached_tokens": 0},
    }
    return SimpleNamespace(pic=RequestState(options), **{**plain, **fields})


@pytest.fixture
def cache() -> PicRadixCache:
    cache = PicRadixCache.__new__(PicRadixCache)
    splicer: Any = None
    cache.attach(config=PicConfig(), splicer=splicer, cost=None, metrics=Counts(), delimiters=frozenset(), max_gaps=32)
    cache.index = Index()  # type: ignore[assignment]
    return cache


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"multi_item_delimiter_indices": [10, 20]}, Fallback.SCORING),
        ({"token_indices_to_pool": [10, 20]}, Fallback.SCORING),
        ({"input_embeds": [[0.0]]}, Fallback.EMBEDDINGS),
        ({"positional_embed_overrides": "some"}, Fallback.EMBEDDINGS),
        ({"multimodal_inputs": "an image"}, Fallback.EMBEDDINGS),
        ({"lora_id": "a"}, Fallback.ADAPTER),
        ({"return_hidden_states": True}, Fallback.HIDDEN_STATES),
        ({"session": SimpleNamespace(streaming=True)}, Fallback.SESSION),
        ({"return_logprob": True, "logprob_start_len": 0}, Fallback.INPUT_LOGPROBS),
    ],
)
def test_what_splices_would_not_serve_is_computed(
    cache: PicRadixCache, fields: dict[str, Any], reason: Fallback
) -> None:
    req = request(RequestOptions(), **fields)
    cache.plan_request(req)
    cache.admit(req, first_chunk=True, num_spliced=0)
    assert isinstance(cache.metrics, Counts)
    assert cache.metrics.reasons == [reason]


def test_an_ordinary_request_is_planned_and_one_that_opted_out_is_not(cache: PicRadixCache) -> None:
    with pytest.raises(Planned):
        cache.plan_request(request(RequestOptions()))
    cache.plan_request(request(RequestOptions(mode=Mode.OFF)))


@pytest.mark.parametrize(
    ("fields", "computed_from"),
    [
        ({}, None),
        ({"logprob_start_len": 0}, None),
        ({"return_logprob": True, "logprob_start_len": 200}, 200),
        # What SGLang makes of a request for logprobs of the answer. Retracted and prefilled again, the answer so far is
        # part of the extend, and its logprobs are taken once more.
        ({"return_logprob": True, "logprob_start_len": 250, "origin_input_ids": array("q", range(250))}, 250),
    ],
)
def test_what_logprobs_are_wanted_of_is_computed(
    cache: PicRadixCache, fields: dict[str, Any], computed_from: int | None
) -> None:
    with pytest.raises(Planned):
        cache.plan_request(request(RequestOptions(), **fields))
    assert cache.index.options.compute_from == computed_from


def test_a_short_prompt_whose_answer_is_wanted_with_logprobs_is_not_refused(cache: PicRadixCache) -> None:
    with pytest.raises(Planned):
        cache.plan_request(
            request(RequestOptions(), return_logprob=True, logprob_start_len=20, origin_input_ids=array("q", range(20)))
        )


def test_a_batch_that_cannot_be_narrowed_gives_its_donors_back(
    cache: PicRadixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[object] = []
    monkeypatch.setattr(cache, "unlock", released.append)
    splice = PendingSplice(Plan(prefix_len=0, end=9, runs=()), [], locks=["a", "b"])
    cache.forgo([splice, None])
    assert released == ["b", "a"]
    assert isinstance(cache.metrics, Counts)
    assert cache.metrics.reasons == [Fallback.BATCH]


def test_every_turn_of_a_streaming_session_is_kept_apart_from_spliced_rows(cache: PicRadixCache) -> None:
    """Its later turns go on with the row of the first, and any of them may ask for no splices."""
    streaming, ordinary = (request(RequestOptions(), session=SimpleNamespace(streaming=s)) for s in (True, False))
    opted_out = request(RequestOptions(mode=Mode.OFF))
    assert tree_key(streaming) == tree_key(opted_out) != tree_key(ordinary)
    assert tree_key(ordinary) == tree_key(request(RequestOptions())) is None
    # What a session lent must not be taken back as a miss, even while an audit has switched its namespace off.
    audit = SimpleNamespace(serves=lambda _: False)
    cache.audit = audit  # type: ignore[assignment]
    assert not cache._ignores_prefix(streaming)
    assert cache._ignores_prefix(ordinary)


def test_backends_with_tables_have_room_for_so_many_sequences() -> None:
    def runner(backend: str, rows: int) -> Any:
        pool = SimpleNamespace(size=rows)
        return SimpleNamespace(prefill_attention_backend_str=backend, req_to_token_pool=pool)

    assert max_sequences(runner("triton", 48)) == 48
    assert max_sequences(runner("pic_cpu", 1)) >= 4096
    with pytest.raises(UnsupportedError, match=r"--max-running-requests 1 .*'flashinfer'.* 2 or more"):
        max_sequences(runner("flashinfer", 1))


def test_every_reason_has_a_series_and_a_sentence(cache: PicRadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason that only the planner knew would stop the scheduler when it is counted."""
    registry = CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "Counter", partial(prometheus_client.Counter, registry=registry))
    cache.metrics = Metrics({"rank": "0"})
    req = request(RequestOptions(), retracted_stain=True)
    req.pic.dropped = dict.fromkeys(DropReason, 2)
    cache.admit(req, first_chunk=False, num_spliced=0)
    labels = [reason.value for reason in REASONS]
    counted = [
        registry.get_sample_value("sglang:pic_fallbacks_total", {"rank": "0", "reason": label}) for label in labels
    ]
    assert counted == [2.0] * len(DropReason) + [0.0] * len(Fallback)
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[A-Z].*\.", reason.description) for reason in REASONS)
