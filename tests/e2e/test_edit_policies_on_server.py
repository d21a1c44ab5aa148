"""Lanes through a real server: no request meets rows that were spliced under another `edit` policy."""

from __future__ import annotations

import pytest

from tests.e2e.servers import on_each_server, on_servers
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
    assert grown["changed_fields"] == 2, "one in each request, however many chunks its prefill has"


@on_servers("gqa_page1.small_pool")
def test_what_was_served_in_place_reaches_no_other_policy(client: Client) -> None:
    """Spliced rows are in the tree under the text of the new prompt: without lanes they would be its prefix."""
    client.generate(_OLD)
    client.generate(_NEW, pic={"edit": "in_place"})
    for edit in ("notes", "recompile"):
        first, again = (client.generate(_NEW, pic={"edit": edit}) for _ in range(2))
        assert 50 < first.cached_tokens == first.chunk_hit_tokens, "donors are, prefixes are not"
        assert first.guarded_tokens > 0
        assert (again.cached_tokens, again.chunk_hit_tokens) == (_LEN - 1, 0), "its own rows are a prefix"
    assert client.generate(_NEW, pic={"edit": "in_place"}).chunk_hit_tokens == 0
    assert client.generate(_NEW, pic={"mode": "off"}).cached_tokens == 0
