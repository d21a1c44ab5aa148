"""Lanes through a real server: no request meets rows that were spliced under another `edit` policy."""

from __future__ import annotations

import pytest

from tests.e2e.servers import on_each_server
from tests.e2e.serving import Client, divergence, random_tokens

pytestmark = pytest.mark.e2e

_FIELD_AT, _FIELD_LEN, _LEN = 120, 4, 300
_OLD = random_tokens(60, _LEN)
_NEW = [*_OLD[:_FIELD_AT], *random_tokens(61, _FIELD_LEN), *_OLD[_FIELD_AT + _FIELD_LEN :]]
"""The same prompt, in which a field has another value."""


@on_each_server("gqa_page1.small_pool", "gqa_page1_tp2")
def test_recompile_equals_a_full_prefill_whatever_was_served_before(client: Client) -> None:
    """In float32, with random weights, where a single stale row shows in the first token."""
    before = client.counters()
    client.generate(_OLD)
    in_place = client.generate(_NEW, pic={"edit": "in_place"})
    assert in_place.behind_change_tokens == _LEN - 1 - _FIELD_AT - _FIELD_LEN - 1, "seam and last token are computed"
    assert in_place.guarded_tokens == 0
    recompile = client.generate(_NEW, pic={"edit": "recompile"})
    assert recompile.behind_change_tokens == 0
    missing = in_place.behind_change_tokens - recompile.guarded_tokens
    assert missing in (0, 1), "its prefill has two chunks, and the second may begin with a seam"
    assert 50 < recompile.chunk_hit_tokens <= _FIELD_AT, "what stands before the field"
    full = client.generate(_NEW, pic={"mode": "off"})
    assert full.cached_tokens == full.guarded_tokens == 0
    # Over the 20 likeliest tokens rounding alone does not cancel out.
    assert divergence(full.first_token, recompile.first_token) <= 1e-5
    assert divergence(full.first_token, in_place.first_token) > 1e-4

    grown = client.grown(before)
    assert grown["spliced_tokens:changed"] == in_place.behind_change_tokens
    assert grown["guarded_tokens"] == recompile.guarded_tokens
