"""A pool that is far too small: evictions, retractions, aborts and mixed batches must leave every slot accounted for.

SGLang checks its pools and its tree whenever it is idle, and ends the server if a slot or a lock is missing.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.servers import on_each_server, on_servers
from tests.e2e.serving import Answer, Client, greedy, random_tokens

pytestmark = pytest.mark.e2e

_NEW_TOKENS = 40
_DOCUMENTS = [random_tokens(seed, 150) for seed in range(8)]


@pytest.mark.feature("aborts and retractions", "mixed chunks", "overlap schedule")
@on_each_server("gqa_page16.small_pool", "gqa_page1.small_pool", "gpt_oss_page16.small_pool")
def test_nothing_leaks_under_pressure(client: Client) -> None:
    """In pages of 16 without audits, in pages of 1 with audits that want the same slots."""
    rng = random.Random(11)
    prompts = []
    for i in range(30):
        documents = rng.sample(_DOCUMENTS, 4)
        prompts.append([*random_tokens(1000 + i, 35), *(token for document in documents for token in document)])
    before = client.counters()
    with ThreadPoolExecutor(12) as pool:
        lengths = list(pool.map(lambda job: _generate(client, *job), enumerate(prompts)))
    assert all(length == _NEW_TOKENS for i, length in enumerate(lengths) if not _is_aborted(i))
    grown = client.grown(before)
    assert grown["tokens:chunk"] > 0
    assert sum(grown[f"tokens:{source}"] for source in ("prefix", "chunk", "computed")) == grown["prompt_tokens"]
    # An idle server has accounted for its slots: a leak would have ended it. A flush needs every lock back.
    client.flush()
    assert client.generate(prompts[0]).cached_tokens == 0
    if "audit" in client.internal_state():
        num_audited = client.audit()["num_audited"]
        answers = [client.generate(prompt) for prompt in prompts[1:5]]
        assert any(answer.chunk_hit_tokens for answer in answers)
        assert client.audit()["num_audited"] > num_audited
    assert client.faults() == ""


@pytest.mark.feature("sessions of the radix cache")
@on_servers("gqa_page16.small_pool")
def test_rows_of_a_session_are_donors_until_it_closes(client: Client) -> None:
    """Other requests fill the pool twice: rows that a session refers to are evicted last."""
    document = random_tokens(2000, 400)

    def ask(seed: int, **session: str) -> Answer:
        return client.generate([*random_tokens(seed, 40), *document, *random_tokens(seed + 1, 20)], **session)

    def fill_the_pool(seed: int) -> None:
        for number in range(12):
            client.generate(random_tokens(seed + number, 450), max_new_tokens=1)

    client.post("/open_session", {"capacity_of_str_len": 1, "session_id": "kept"})
    ask(2001, session_id="kept")
    fill_the_pool(2100)
    assert ask(2010).chunk_hit_tokens > 300
    client.post("/close_session", {"session_id": "kept"})
    fill_the_pool(2200)
    assert ask(2020).cached_tokens == 0
    client.flush()
    assert client.faults() == ""


def _is_aborted(number: int) -> bool:
    return number % 5 == 4


def _generate(client: Client, number: int, prompt: list[int]) -> int:
    """How many tokens came; every fifth request is aborted at some moment of its life."""
    body = {"input_ids": prompt, "rid": f"request-{number}", "sampling_params": greedy(_NEW_TOKENS)}
    with ThreadPoolExecutor(1) as aborter:
        if _is_aborted(number):
            aborter.submit(client.post, "/abort_request", {"rid": body["rid"]})
        result = client.post("/generate", body)
    return len(result.get("output_ids", []))
