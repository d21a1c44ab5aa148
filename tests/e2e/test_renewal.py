"""Rows that a server computes again are those of a full prefill, and whoever comes next stands on exact ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, assert_same, divergence, random_tokens, wait_until

pytestmark = pytest.mark.e2e

_DOCUMENT = random_tokens(1, 300)


@pytest.fixture(name="client")
def _client(client_of: Callable[[str], Client]) -> Iterator[Client]:
    client = client_of("gqa_page1.renews")
    client.generate([*random_tokens(2, 40), *_DOCUMENT, *random_tokens(3, 60)])
    yield client
    assert client.internal_state()["renewal"]["ended"].get("flushed", 0) == 0, "there was no fault"


def renewed(client: Client) -> dict[str, Any]:
    """What was computed again, once nothing waits."""
    wait_until(lambda: client.internal_state()["renewal"]["num_waiting"] == 0)
    found: dict[str, Any] = client.internal_state()["renewal"]
    return found


def assert_exact(client: Client, prompt: list[int], *, is_close: bool) -> None:
    """Two turns behind a prompt: what the first one inherited, and that the second one inherits nothing."""
    turn, other = ([*prompt, *random_tokens(seed, 20)] for seed in (90, 91))
    first, full = client.generate(turn), client.generate(turn, pic={"mode": "off"})
    assert (first.inherited_tokens == 0) == is_close
    assert (divergence(full.first_token, first.first_token) <= 1e-5) == is_close
    renewed(client)
    second = client.generate(other)
    assert (second.inherited_tokens, second.cached_tokens) == (0, len(prompt))
    assert_same(client.generate(other, pic={"mode": "off"}), second)


@on_servers("gqa_page1.renews")
def test_a_prompt_that_comes_again_is_healed(client: Client) -> None:
    before = renewed(client)
    # The answer is short, so the careful rule computes the end of the prompt, and nothing is repaired.
    prompt = [*random_tokens(4, 50), *_DOCUMENT, *random_tokens(5, 1100)]
    assert client.generate(prompt).chunk_hit_tokens > 200
    assert_exact(client, prompt, is_close=False)
    after = renewed(client)
    assert after["num_repaired"] == before["num_repaired"]
    assert after["num_healed"] - before["num_healed"] >= len(_DOCUMENT) + 1100 - 32


@on_servers("gqa_page1.renews")
def test_the_end_of_a_prompt_is_repaired_beside_its_answer(client: Client) -> None:
    before = renewed(client)
    prompt = [*random_tokens(6, 250), *_DOCUMENT, 7, 8]
    assert client.generate(prompt).chunk_hit_tokens == 0, "before a short answer the end is as careful as can be"
    assert renewed(client)["num_repaired"] == before["num_repaired"]
    prompt = [*random_tokens(8, 250), *_DOCUMENT, 7, 8]
    assert client.generate(prompt, max_new_tokens=40).chunk_hit_tokens > 200
    assert renewed(client)["num_repaired"] - before["num_repaired"] >= len(_DOCUMENT)
    assert_exact(client, prompt, is_close=True)
    # An answer goes on while the rows before it are written anew; the others of its batch are as they were.
    neighbour = random_tokens(10, 90)
    alone = client.generate(neighbour, max_new_tokens=24)
    beside, _ = client.generate_all([neighbour, [*random_tokens(11, 250), *_DOCUMENT, 9, 8]], max_new_tokens=24)
    assert_same(alone, beside)
