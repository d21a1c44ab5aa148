"""A server whose model has a sparse-attention indexer: spliced prompts choose the tokens that computed ones do."""

from __future__ import annotations

import pytest

from tests.e2e.servers import on_each_server
from tests.e2e.serving import Client, assert_same, random_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.feature("a sparse-attention indexer", "DeepseekV32ForCausalLM")]

PAGE = 64
on_dsa = on_each_server("dsa_page64", "dsa_page64.dp2", "dsa_page64.host", "dsa_page64.tp2")


@on_dsa
def test_shift_zero_equals_full_prefill(client: Client) -> None:
    """In float32, over prompts below and above the prefill chunk, with answers that are decoded from chosen tokens."""
    for seed, length in enumerate((200, 600)):
        prompt = random_tokens(seed, length)
        full = client.generate(prompt)
        assert full.cached_tokens == 0
        spliced = client.generate(prompt)
        assert spliced.chunk_hit_tokens >= length // PAGE * PAGE - 32 - 1
        assert_same(full, spliced)


@on_dsa
def test_gaps_and_shifts_in_mixed_batches(client: Client) -> None:
    """Runs from two donors, moved by no multiple of a page, beside a request without runs; every slot is given back."""
    donors = [random_tokens(100 + i, 270) for i in range(2)]
    for donor in donors:
        client.generate(donor)
    fresh = random_tokens(200, 90)
    mixed = [*fresh[:50], *donors[1][40:250], *fresh[50:], *donors[0][33:240]]
    before = client.counters()
    answers = client.generate_all([mixed, random_tokens(201, 300)])
    grown = client.grown(before)
    assert grown["runs"] >= 2
    assert sum(grown[f"tokens:{source}"] for source in ("prefix", "chunk", "computed")) == grown["prompt_tokens"]
    assert answers[0].chunk_hit_tokens >= 210 + 207 - 2 * 2 - 2 * 16
    assert answers[1].chunk_hit_tokens == 0
