"""Ranks that serve requests of their own: DP attention, where they compute together, and replicas, which do not.

Each rank has its own tree and donors. A rank that computed another number of tokens than it told the others would hang
them: a client waits for no answer for ever.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.faults import STAGES
from tests.e2e.servers import on_each_server, on_servers
from tests.e2e.serving import Answer, Client, ask, assert_same, greedy, random_tokens

pytestmark = pytest.mark.e2e

_OFF = {"mode": "off"}
with_dp_attention = on_each_server("mla_page1_dp2", "mtp_page1_dp2")


def side_by_side(client: Client, *prompts: Sequence[int], **body: object) -> list[Answer]:
    """A prompt for each rank, all at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        waiting = [
            pool.submit(client.on_rank(rank).generate, prompt, **body)  # type: ignore[arg-type]
            for rank, prompt in enumerate(prompts)
        ]
        return [each.result() for each in waiting]


@with_dp_attention
@pytest.mark.feature("DP attention", "tensor parallelism of 2")
def test_each_rank_splices_from_its_own_tree(client: Client) -> None:
    """At shift 0, against `mode: off`; what one rank holds is no donor of the other, and each counts for itself."""
    for rank in (0, 1):
        here, other = client.on_rank(rank), client.on_rank(1 - rank)
        for seed, length in ((rank, 150), (10 + rank, 600)):
            prompt = random_tokens(seed, length)
            full = here.generate(prompt, pic=_OFF)
            assert here.generate(prompt).cached_tokens == 0
            before, elsewhere = here.counters(), other.counters()
            spliced = here.generate(prompt)
            # Beside a draft a run ends a token early.
            assert spliced.chunk_hit_tokens >= length - 32 - 1 - ("draft model" in client.log())
            assert_same(full, spliced)
            assert here.grown(before)["tokens:chunk"] == spliced.chunk_hit_tokens
            assert other.counters() == elsewhere
            # A gap batch beside an idle rank and a whole one are of other sizes: the other rank still answers rightly.
            assert other.generate(prompt).cached_tokens == 0
    assert "audit" not in client.internal_state()
    assert "audits are off with DP attention" in client.log()


@with_dp_attention
@pytest.mark.feature("DP attention", "chunked prefill")
def test_a_rank_with_a_splice_beside_one_without(client: Client) -> None:
    """Beside one that computes a prompt, decodes, splices too, or whose request is aborted."""
    donors = [random_tokens(20 + rank, 420) for rank in (0, 1)]
    moved = [[*random_tokens(30 + rank, 50), *donors[rank][:380]] for rank in (0, 1)]
    fresh = [random_tokens(40 + rank, 300) for rank in (0, 1)]
    expected = [
        client.on_rank(rank).generate(prompt, pic=_OFF)
        for prompts in (moved, fresh)
        for rank, prompt in enumerate(prompts)
    ]
    for rank in (0, 1):
        client.on_rank(rank).generate(donors[rank])
    for rank in (0, 1):
        prompts = [moved[rank], fresh[1 - rank]]
        answers = side_by_side(client, *(prompts if rank == 0 else reversed(prompts)))
        assert answers[rank].chunk_hit_tokens > 300
        assert answers[1 - rank].chunk_hit_tokens == 0
        assert_same(expected[3 - rank], answers[1 - rank])
    both = side_by_side(client, *moved)
    assert all(answer.chunk_hit_tokens > 300 for answer in both)
    for rank in (0, 1):
        with client.on_rank(1 - rank).running(random_tokens(50 + rank, 900)):
            assert client.on_rank(rank).generate(moved[rank]).chunk_hit_tokens > 300
        assert client.on_rank(rank).generate(moved[rank], max_new_tokens=2).chunk_hit_tokens > 300


@on_servers("mtp_page1_dp2")
@pytest.mark.feature("speculative decoding with DP attention")
def test_a_draft_guesses_as_much_on_each_rank(client: Client) -> None:
    """At shift 0, while the other rank is idle or decodes."""
    for rank in (0, 1):
        here, other = client.on_rank(rank), client.on_rank(1 - rank)
        prompt = random_tokens(100 + rank, 600)
        full = ask(here, prompt)
        spliced = ask(here, prompt)
        assert full.num_right > 0 == full.num_spliced
        assert spliced.num_spliced >= 600 - 32 - 2
        assert spliced._replace(num_spliced=0) == full
        with other.running(random_tokens(110 + rank, 700)):
            assert [ask(here, prompt) for _ in range(3)] == [spliced] * 3


@with_dp_attention
@pytest.mark.parametrize("stage", ["resolve", "splice"])
def test_a_fault_of_one_rank_costs_its_request_the_splice_and_no_rank_its_step(client: Client, stage: str) -> None:
    """Until the rows are moved a fault is met before the ranks tell each other how many tokens they compute."""
    for rank in (0, 1):
        here, other = client.on_rank(rank), client.on_rank(1 - rank)
        prompt, beside = random_tokens(60 + rank, 420), random_tokens(70 + rank, 420)
        whole, whole_beside = here.generate(prompt, pic=_OFF), other.generate(beside, pic=_OFF)
        here.generate(prompt)
        other.generate(beside)
        before, elsewhere = here.counters(), other.counters()
        with ThreadPoolExecutor(2) as pool:
            faulty = pool.submit(here.generate, prompt, fault=stage)
            spliced = pool.submit(other.generate, beside).result()
            answer = faulty.result()
        assert_same(whole, answer)
        assert_same(whole_beside, spliced)
        assert spliced.chunk_hit_tokens > 300
        grown, reason = here.grown(before), f"fallbacks:{STAGES[stage]}"
        assert grown[reason] == 1
        assert other.grown(elsewhere)[reason] == 0
        assert answer.chunk_hit_tokens == 0
        assert (grown["undone_tokens"] > 0) == (stage == "splice")


@with_dp_attention
@pytest.mark.feature("DP attention", "aborts and retractions")
def test_random_traffic_on_both_ranks_never_stops(client: Client) -> None:
    """Minutes of it are bench/results/soak-dp-attention.json."""
    texts = [random_tokens(80 + number, 260) for number in range(4)]
    spliced: list[int] = []

    def send(worker: int) -> None:
        rng = random.Random(worker)
        for count in range(8):
            head, text = random_tokens(rng.randrange(1 << 30), rng.randrange(1, 120)), rng.choice(texts)
            rank, rid = rng.randrange(2), f"traffic-{worker}-{count}"
            pic = rng.choice((None, None, None, _OFF, {"edit": "recompile"}))
            body = {
                **{"rid": rid, "input_ids": [*head, *text[: rng.randrange(60, 260)]], "routed_dp_rank": rank},
                "sampling_params": greedy(rng.choice((1, 2, 8, 24)), pic=pic),
            }
            if rng.random() < 0.15:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(client.post, "/generate", body)
                    client.post("/abort_request", {"rid": rid})
            else:
                found = client.post("/generate", body)
                spliced.append((found["meta_info"].get("cached_tokens_details") or {}).get("pic", 0))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(send, range(6)))
    assert sum(map(bool, spliced)) > 5
    # SGLang checks every slot and every lock when it is idle, and flushes only then.
    client.flush()
    prompt = random_tokens(90, 200)
    for rank in (0, 1):
        here = client.on_rank(rank)
        full = here.generate(prompt, pic=_OFF)
        here.generate(prompt)
        assert_same(full, here.generate(prompt))


@on_servers("mla_page1.fa3")
@pytest.mark.feature("data parallelism")
def test_each_replica_has_donors_of_its_own(client: Client) -> None:
    prompt = random_tokens(95, 400)
    for rank in (0, 1):
        here = client.on_rank(rank)
        full = here.generate(prompt, pic=_OFF)
        assert here.generate(prompt).cached_tokens == 0
        before = here.counters()
        spliced = here.generate(prompt)
        assert spliced.chunk_hit_tokens >= 400 - 32 - 1
        assert_same(full, spliced)
        assert here.grown(before)["tokens:chunk"] == spliced.chunk_hit_tokens
        assert here.internal_state()["dp_rank"] == rank
