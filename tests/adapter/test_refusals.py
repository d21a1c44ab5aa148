"""Requests that are computed as usual, and counted by reason."""

from __future__ import annotations

import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # SGLang and what it imports warn about this machine's missing accelerators.
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang.srt.mem_cache.unified_radix_cache")
    from sglang_pic.adapter.cache import PicRadixCache

from sglang_pic.adapter.metrics import Fallback, Metrics
from sglang_pic.adapter.options import Mode, RequestOptions
from sglang_pic.adapter.request_state import RequestState
from sglang_pic.config import PicConfig


class Counts(Metrics):
    """Keeps the reasons instead of exporting them."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reasons: list[Fallback] = []

    def count_fallback(self, reason: Fallback, count: int = 1) -> None:
        self.reasons += [reason] * count


class Planned(Exception):
    """The index was asked for a plan."""


class Index:
    """Stands where the chunk index does."""

    def plan(self, *_: object, **__: object) -> None:
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
        ({"session": "a session"}, Fallback.SESSION),
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
