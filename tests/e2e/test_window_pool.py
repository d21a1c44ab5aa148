"""Windows in a pool of their own, as gpt-oss starts by default, through a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, divergence, random_tokens, wait_until

pytestmark = pytest.mark.e2e


@pytest.mark.feature("sliding windows in a pool of their own")
@on_servers("gpt_oss_page16.small_pool")
def test_text_that_moved_is_nearer_to_a_full_prefill_than_unturned_keys_are(client: Client) -> None:
    """Text behind another beginning of another length, read by prompts that go on in different ways."""
    moved, unturned = list[float](), list[float]()
    for number in range(6):
        text, tail = random_tokens(number, 400), random_tokens(50 + number, 24)
        prompt = [*random_tokens(100 + number, 70), *text, *tail]
        client.flush()
        full = client.generate(prompt, extra_key="full", pic={"mode": "off"})
        client.generate([*random_tokens(200 + number, 333), *text], extra_key="donors", max_new_tokens=1)
        for kls, key, rotate in ((moved, "moved", True), (unturned, "unturned", False)):
            testing = {"donors_from": "donors", "rotate": rotate}
            answer = client.generate(prompt, extra_key=key, pic={"testing": testing})
            assert answer.chunk_hit_tokens > 300
            kls.append(divergence(full.first_token, answer.first_token))
    assert sum(moved) < 0.5 * sum(unturned)


@on_servers("gpt_oss_page16.small_pool")
def test_what_an_answer_left_outside_its_window_is_computed(client: Client) -> None:
    """The window rows of a long answer are gone, those of its prompt are not."""
    prompt = random_tokens(1, 200)
    answer = client.generate(prompt, max_new_tokens=500)
    again = client.generate([*random_tokens(2, 90), *prompt, *answer.ids], max_new_tokens=1)
    assert 150 < again.chunk_hit_tokens < 400
    client.flush()
    assert client.faults() == ""


@on_servers("gpt_oss_page16.full_pool")
def test_a_prompt_in_chunks_that_finds_no_room_beside_its_donors_keeps_its_answer(client: Client) -> None:
    """SGLang gives its next chunk no slots while they are locked, but would give some to the prompts behind it."""
    for number in range(3):
        donor, decoding = random_tokens(number, 450), random_tokens(10 + number, 330)
        prompt = [*random_tokens(20 + number, 100), *donor[330:], *random_tokens(30 + number, 120)]
        client.flush()
        full = client.generate(prompt, pic={"mode": "off"})
        client.flush()
        client.generate(donor, max_new_tokens=1)
        before = client.counters()
        with ThreadPoolExecutor(5) as pool:
            pool.submit(client.generate, decoding, max_new_tokens=390)
            wait_until(lambda: client.grown(before)["prompt_tokens"] >= len(decoding))  # noqa: B023
            answer = pool.submit(client.generate, prompt)
            for other in range(3):
                pool.submit(client.generate, random_tokens(40 + 3 * number + other, 20))
        assert answer.result().ids == full.ids
        assert client.grown(before)["fallbacks:memory"] > 0
    assert client.faults() == ""
