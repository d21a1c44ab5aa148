"""Pins through real servers: what is pinned survives pressure, gives way before a request waits for ever, and is
decided alike on every rank. SGLang checks its pools whenever it is idle, and ends the server if a slot is missing."""

from __future__ import annotations

import pytest

from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, random_tokens

pytestmark = pytest.mark.e2e


def held(client: Client) -> list[tuple[str, int]]:
    """Names and tokens of the pins, oldest first."""
    return [(pin["name"], pin["tokens"]) for pin in client.internal_state()["pins"]["held"]]


@on_servers("gqa_page16.small_pool")
def test_a_pin_survives_what_evicts_everything_else_and_gives_way_to_a_request(client: Client) -> None:
    pinned, other = random_tokens(1, 405), random_tokens(2, 405)
    client.generate(pinned, pic={"pin": "a.skill"})
    client.generate(other)
    client.generate_all([random_tokens(10 + i, 600) for i in range(12)], max_new_tokens=20)
    assert client.generate([*pinned, *random_tokens(3, 50)]).cached_tokens == 400
    assert client.generate(other).cached_tokens == 0
    assert held(client) == [("a.skill", 400)]
    assert client.counters()["pinned_tokens"] == 400
    # It fits into the empty pool only, and nobody runs who would leave it slots.
    assert len(client.generate(random_tokens(4, 2300)).ids) == 8
    assert held(client) == []
    assert client.counters()["pins_ended:memory"] == 1
    client.generate(pinned, pic={"pin": "a.skill"})
    client.generate(other, pic={"pin": "another", "unpin": "a.skill"})
    assert held(client) == [("another", 400)]
    client.generate(random_tokens(5, 700), pic={"pin": "too-long"})
    assert client.counters()["pins_ended:refused"] == 1
    client.flush()
    assert held(client) == []
    assert client.generate(other).cached_tokens == 0
    client.server.check_alive()
    assert client.faults() == ""


@on_servers("gqa_page1_tp2")
def test_ranks_decide_alike(client: Client) -> None:
    """Ranks that held other pins would plan other splices, and a pass of one would wait for the other."""
    skills = [random_tokens(seed, 700) for seed in range(3)]
    near = {"skills": "near", "tail_tokens": 256}
    prompt = [*random_tokens(60, 500), *skills[0], *random_tokens(61, 20), *skills[2], *random_tokens(62, 30)]
    for number, skill in enumerate(skills):
        client.generate([*random_tokens(50, 60), *skill], pic={"pin": f"skill-{number}"})
    client.generate([7, 8, 9], pic={"unpin": "skill-1"})
    assert held(client) == [("skill-0", 760), ("skill-2", 760)]
    assert client.generate(prompt, pic=near).chunk_hit_tokens >= 1390
    for number in range(4):
        client.generate(random_tokens(70 + number, 2000), pic={"pin": f"long-{number}"})
    assert held(client) == [("long-1", 2000), ("long-2", 2000), ("long-3", 2000)], "a quarter of the pool"
    client.server.check_alive()
    assert client.faults() == ""
