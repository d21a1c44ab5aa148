"""Windows in a pool of their own, as gpt-oss starts by default, through a real server."""

from __future__ import annotations

import pytest

from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, divergence, random_tokens

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
