"""Lanes through a real server: no request meets rows that were spliced under another `edit` policy."""

from __future__ import annotations

import pytest

from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, random_tokens

pytestmark = pytest.mark.e2e

_FIELD_AT, _LEN = 120, 300


@on_servers("gqa_page1.small_pool")
def test_what_was_served_in_place_reaches_no_other_policy(client: Client) -> None:
    """Spliced rows are in the tree under the text of the new prompt: without lanes they would be its prefix."""
    old, other = random_tokens(60, _LEN), random_tokens(61, 4)
    new = [*old[:_FIELD_AT], *other, *old[_FIELD_AT + 4 :]]
    client.generate(old)
    in_place = client.generate(new, pic={"edit": "in_place"})
    assert in_place.chunk_hit_tokens > 200
    assert in_place.chunk_hit_tokens == in_place.cached_tokens, "its lane is empty"
    again = client.generate(new, pic={"edit": "in_place"})
    assert (again.cached_tokens, again.chunk_hit_tokens) == (_LEN - 1, 0), "its rows are a prefix for the same policy"

    notes = client.generate(new)
    assert notes.cached_tokens - notes.chunk_hit_tokens == _FIELD_AT, "for the server's policy the old prompt's are"
    recompile = client.generate(new, pic={"edit": "recompile"})
    assert recompile.cached_tokens == recompile.chunk_hit_tokens, "and for a third policy nothing is"
