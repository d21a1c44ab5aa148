"""A whole server on one of SGLang's production attention backends, over a reference kernel, against `pic_cpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.servers import on_servers
from tests.e2e.serving import Answer, Client, divergence, random_tokens

pytestmark = pytest.mark.e2e


@on_servers("gqa_page16", "gqa_page16.fa3")
def test_fa3_answers_as_the_cpu_backend_does(client_of: Callable[[str], Client]) -> None:
    """In float32, at shift 0, shifted, and with prompts longer than a prefill chunk."""
    _compare(client_of, "gqa_page16")


@on_servers("mla_page1", "mla_page1.fa3")
def test_fa3_answers_as_the_cpu_backend_does_with_mla(client_of: Callable[[str], Client]) -> None:
    _compare(client_of, "mla_page1")


def _compare(client_of: Callable[[str], Client], name: str) -> None:
    # One server after the other.
    reference, answers = (_serve(client_of(server)) for server in (name, f"{name}.fa3"))
    hits = [answer.chunk_hit_tokens for answer in answers]
    assert hits == [answer.chunk_hit_tokens for answer in reference]
    assert all(count > 0 for count in hits[1::2])
    for one, other in zip(reference, answers, strict=True):
        assert divergence(one.first_token, other.first_token) <= 1e-5
        assert other.ids == one.ids


def _serve(client: Client) -> list[Answer]:
    """Computed and spliced answers in turn."""
    answers = []
    for seed, length in enumerate((150, 600)):
        prompt, fresh = random_tokens(seed, length), random_tokens(10 + seed, 90)
        moved = [*fresh[:50], *prompt[40 : length - 20], *fresh[50:]]
        answers += [client.generate(prompt), client.generate(prompt)]
        answers += [client.generate(random_tokens(20 + seed, length)), client.generate(moved)]
    return answers
