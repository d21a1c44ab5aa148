"""A prompt served by its own chunks in its own context equals a full prefill: the splice itself adds no error.

The probe's switch `ignore_prefix` throws exact hits away, so the second of two equal prompts is spliced at shift 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pic_bench.shift_zero import Setup, measure, seeded_prompts

from tests.e2e.serving import Client, divergence, random_tokens, serve

pytestmark = pytest.mark.e2e

# Model, tensor parallel ranks, page size: every value of each at least once with each family.
_SETUPS = [("tiny-gqa", 1, 16), ("tiny-gqa", 2, 1), ("tiny-mla", 1, 1), ("tiny-mla", 2, 16)]


@pytest.fixture(scope="module", params=_SETUPS, ids=lambda setup: f"{setup[0]}-tp{setup[1]}-page{setup[2]}")
def client(
    request: pytest.FixtureRequest,
    model_dir: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    name, ranks, page_size = request.param
    with serve(
        model_dir(name),
        tmp_path_factory.mktemp("server"),
        *("--dtype", "float32", "--tp-size", str(ranks), "--page-size", str(page_size)),
        *("--chunked-prefill-size", "256"),
        config={"cost_gate": "off"},
        probe={"ignore_prefix": True, "check_invariants": True},
    ) as client:
        yield client


def test_shift_zero_equals_full_prefill(client: Client) -> None:
    """In float32, over prompts below and above the prefill chunk."""
    for seed, length in enumerate((150, 600)):
        prompt = random_tokens(seed, length)
        full = client.generate(prompt)
        assert full.cached_tokens == 0
        spliced = client.generate(prompt)
        assert spliced.chunk_hit_tokens >= length - 32 - 16 - 1, "all but the sink, the last token and a partial page"
        assert divergence(full.first_token, spliced.first_token) <= 1e-5
        assert spliced.ids == full.ids


def test_several_donors_gaps_and_shifts_in_mixed_batches(client: Client) -> None:
    """Runs from three donors with gaps between, beside requests without runs; every slot is given back."""
    donors = [random_tokens(100 + i, 200) for i in range(3)]
    for donor in donors:
        client.generate(donor)
    fresh = random_tokens(200, 90)
    mixed = [*fresh[:50], *donors[2][40:160], *fresh[50:70], *donors[0][33:200], *fresh[70:], *donors[1][60:190]]
    before = client.counters()
    answers = client.generate_all([mixed, random_tokens(201, 300), donors[1], random_tokens(202, 40)])
    after = client.counters()
    assert after["runs"] - before["runs"] >= 4
    # The last token of a prompt is computed, and one token at each seam.
    assert answers[0].chunk_hit_tokens >= 120 + 167 + 130 - 3 * 2 - 3 * 16
    assert answers[1].chunk_hit_tokens == answers[3].chunk_hit_tokens == 0
    assert answers[2].chunk_hit_tokens >= 200 - 32 - 16 - 1
    # What was spliced is a prefix for later turns, and the row of the mixed request is whole.
    client.flush()
    assert client.generate(donors[0]).cached_tokens == 0, "a flush forgets the chunk index too"


def test_abandoned_requests_leave_nothing_behind(client: Client) -> None:
    """SGLang checks its pools whenever it is idle and ends if a slot or a lock is missing."""
    base = random_tokens(300, 400)
    client.generate(base)
    prompts = [[*random_tokens(301 + i, 40), *base[50:350]] for i in range(4)]
    client.generate_all(prompts, max_new_tokens=2)
    client.generate_all([p[:200] for p in prompts], max_new_tokens=1)
    counters = client.counters()
    sources = sum(counters[f"tokens:{source}"] for source in ("prefix", "chunk", "computed"))
    assert sources == counters["prompt_tokens"]
    client.server.check_alive()


def test_in_bf16_a_splice_is_no_further_off_than_an_exact_hit(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Real weights: rounding alone separates a cached prompt from a cold one, in stock SGLang as in ours."""
    setup = Setup(model=str(model_dir("smollm2")), tp_size=1, page_size=1, dtype="bfloat16")
    result = measure(setup, seeded_prompts(6, 250, seed=4), tmp_path)
    # Six prompts leave room for luck; a wrong rotation or a row out of place is orders of magnitude further off.
    assert result.spliced.kl_mean <= 2 * result.exact_hit.kl_mean + 1e-3
