"""A prompt served by its own chunks in its own context equals a full prefill: the splice itself adds no error.

The probe's switch `ignore_prefix` throws exact hits away, so the second of two equal prompts is spliced at shift 0.
"""

from __future__ import annotations

import pytest
from pic_bench.report.stats import top_k_kl
from pic_traces import load

from tests.e2e.servers import on_each_server, on_servers
from tests.e2e.serving import Client, assert_same, random_tokens

pytestmark = pytest.mark.e2e

# Every model family, number of ranks that share a request and page size at least once with each of the others.
FAMILIES = (
    *("gqa_page16", "gqa_page1_tp2", "mla_page1_dp2", "mla_page16_tp2"),
    *("mla_page1", "gemma3_page1", "gpt_oss_page16", "minimax_page16"),
    *("dsa_page64", "dsa_page64.dp2", "dsa_page64.host", "dsa_page64.tp2"),
)
of_sparse = pytest.mark.feature("a sparse-attention indexer", "DeepseekV32ForCausalLM")
"""Among the families: spliced prompts choose the tokens that computed ones do."""


@pytest.mark.feature("rows of float32", "pages of 1", "pages of 16", "tensor parallelism of 2")
@of_sparse
@on_each_server(*FAMILIES, "llama4_page16")
def test_shift_zero_equals_full_prefill(client: Client, servers: tuple[str]) -> None:
    """In float32, over prompts below and above the prefill chunk; answers are decoded from what was spliced."""
    # All but the sink, the last token and a partial page: 150 and 600 end in pages of 16, 200 and 600 in those of 64.
    lengths = {200: 192 - 32 - 1, 600: 576 - 32 - 1} if "page64" in servers[0] else {150: 101, 600: 551}
    for seed, (length, at_least) in enumerate(lengths.items()):
        prompt = random_tokens(seed, length)
        full = client.generate(prompt)
        assert full.cached_tokens == 0
        spliced = client.generate(prompt)
        assert spliced.chunk_hit_tokens >= at_least
        assert_same(full, spliced)


@of_sparse
@on_each_server(*FAMILIES)
def test_several_donors_gaps_and_shifts_in_mixed_batches(client: Client) -> None:
    """Runs from three donors with gaps between, beside requests without runs; every slot is given back.

    SGLang checks its pools whenever it is idle, and ends if a slot or a lock is missing.
    """
    donors = [random_tokens(100 + i, 200) for i in range(3)]
    for donor in donors:
        client.generate(donor)
    fresh = random_tokens(200, 90)
    mixed = [*fresh[:50], *donors[2][40:160], *fresh[50:70], *donors[0][33:200], *fresh[70:], *donors[1][60:190]]
    before = client.counters()
    answers = client.generate_all([mixed, random_tokens(201, 300), donors[1], random_tokens(202, 40)])
    grown = client.grown(before)
    assert grown["runs"] >= 4
    assert sum(grown[f"tokens:{source}"] for source in ("prefix", "chunk", "computed")) == grown["prompt_tokens"]
    # The last token of a prompt is computed, and one token at each seam.
    assert answers[0].chunk_hit_tokens >= 120 + 167 + 130 - 3 * 2 - 3 * 16
    assert answers[1].chunk_hit_tokens == answers[3].chunk_hit_tokens == 0
    assert answers[2].chunk_hit_tokens >= 200 - 32 - 16 - 1
    # What was spliced is a prefix for later turns, and the row of the mixed request is whole.
    client.flush()
    assert client.generate(donors[0]).cached_tokens == 0, "a flush forgets the chunk index too"


@pytest.mark.feature("rows of bfloat16")
@on_servers("smollm2_probed")
def test_in_bf16_a_splice_is_no_further_off_than_an_exact_hit(client: Client) -> None:
    """Real weights: rounding alone separates a cached prompt from a cold one.

    A prompt is served again in a namespace where only the chunks of its cold self are donors: at shift 0.
    """
    hits, splices, before = [], [], client.internal_state()["probe"]["num_gap_passes"]
    for session in load("gen:random?calls=1&sessions=6&prompt=250&seed=4"):
        (call,) = session.calls()
        tokens = client.post("/tokenize", {"prompt": "\n".join(str(m["content"]) for m in call.messages)})["tokens"]
        cold, hit = (client.generate(tokens, extra_key="donors") for _ in range(2))
        spliced = client.generate(tokens, extra_key="spliced", pic={"testing": {"donors_from": "donors"}})
        assert hit.cached_tokens - hit.chunk_hit_tokens > 0.8 * len(tokens)
        assert spliced.cached_tokens == spliced.chunk_hit_tokens > 0.8 * len(tokens)
        first, of_hit, of_splice = ({str(k): v for k, v in a.first_token.items()} for a in (cold, hit, spliced))
        hits.append(top_k_kl(first, of_hit))
        splices.append(top_k_kl(first, of_splice))
    probe = client.internal_state()["probe"]
    assert (probe["num_gap_passes"] - before, probe["num_replayed"]) == (6, 0), "no graphs on a CPU"
    # Six prompts leave room for luck; a wrong rotation or a row out of place is orders of magnitude further off.
    assert sum(splices) <= 2 * sum(hits) + 6e-3
