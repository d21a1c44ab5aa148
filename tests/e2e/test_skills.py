"""Pins through real servers: what is pinned survives pressure, and gives way before a request waits for ever.

SGLang checks its pools whenever it is idle, and ends the server if a slot is missing.
"""

from __future__ import annotations

import json

import pytest

from sglang_pic.client import Skills, compose
from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, entries, random_tokens

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
    model = json.loads(client.server.get("/server_info"))["model_path"]
    client.post("/update_weights_from_disk", {"model_path": model, "flush_cache": False})
    assert held(client) == []
    assert client.counters()["pins_ended:weights"] == 1
    client.generate(other, pic={"pin": "another"})
    client.flush()
    assert held(client) == []
    assert client.generate(other).cached_tokens == 0
    assert client.faults() == ""


@on_servers("text")
def test_a_skill_is_spliced_near_the_end_and_compiled_again_after_a_flush(client: Client) -> None:
    """A skill of 700 tokens in a prompt of 1,360, at the settings of a server that sets none."""
    defaults = {"seam_tokens": 64, "tail_tokens": 64}

    def ask(number: int, skills: str) -> int:
        body = {
            **{"model": "m", "max_tokens": 1, "temperature": 0, "return_cached_tokens_details": True},
            **{"messages": compose(_SYSTEM, [_other(number), _SKILL], f"What is entry {number}?")},
            "custom_params": {"pic": {**defaults, "skills": skills}},
        }
        answer = client.post("/v1/chat/completions", body)
        assert 1300 < answer["usage"]["prompt_tokens"] < 1420
        return answer["sglext"]["cached_tokens_details"]["pic"]

    with Skills(client.server.base_url) as skills:
        alone = skills.compile("system", [], behind=_SYSTEM).tokens
        skill_len = skills.compile("copper", _SKILL, behind=_SYSTEM).tokens - alone
        assert 680 < skill_len < 740
        assert ask(3, "far") < 0.3 * skill_len, "the last 512 tokens are computed: the skill was compiled alone"
        assert ask(4, "near") >= 0.9 * skill_len
        client.flush()
        assert skills.list() == ()
        assert [receipt.name for receipt in skills.ensure()] == ["system", "copper"]
        assert ask(5, "near") >= 0.9 * skill_len
        assert skills.drop("copper")
        assert [pin.name for pin in skills.list()] == ["system"]
    client.flush()


_SYSTEM = "You are the clerk of a copper mine, and answer in one sentence. " * 4
_SKILL = entries(40, "\n")


def _other(number: int) -> str:
    """What stands between the system prompt and the skill: another text for each number."""
    places = " ".join(f"Letter {i * number} goes to office {i * i % (number + 7)}." for i in range(53))
    return f"You work in mail room {number}. {places}"
