"""The live audit through a real server: users notice nothing, a corruption is found, its namespace comes back clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sglang_pic.errors import BenchError
from tests.e2e.servers import on_servers
from tests.e2e.serving import Answer, Client, entries, random_tokens

pytestmark = pytest.mark.e2e

_LONG = 200
_FLIP = {"testing": {"flip_donors": True}}
_BODY = entries(12)


def shifted_prompts(count: int, document_len: int) -> list[list[int]]:
    """The same two documents behind ever new beginnings: each prompt but the first few is spliced."""
    documents = [random_tokens(seed, document_len) for seed in (1, 2)]
    return [[*random_tokens(100 + i, 40), *documents[i % 2], *documents[(i + 1) % 2]] for i in range(count)]


@on_servers("gqa_page16.small_pool", "gqa_page16")
def test_users_notice_nothing(client_of: Callable[[str], Client]) -> None:
    """The same answers, hits and counters as from a server without audits; every spliced request is audited."""
    prompts = shifted_prompts(9, 100)  # what the small pool holds
    plain = client_of("gqa_page16.small_pool")
    assert "audit" not in plain.internal_state()
    expected = answers_of(plain, prompts)
    audited = client_of("gqa_page16")
    assert answers_of(audited, prompts) == expected
    num_spliced = sum(answer.chunk_hit_tokens > 0 for answer in expected)
    audit = audited.audit()
    assert num_spliced >= 7
    assert (audit["num_audited"], audit["num_skipped"]) == (num_spliced, 0)
    assert audit["suspended"] == []
    metrics = audited.server.get("/metrics")
    assert total(metrics, "pic_audited_requests_total") == num_spliced
    assert total(metrics, "pic_audit_tokens_total") == 240 * num_spliced
    assert total(metrics, "pic_audit_kl_nats_count") == num_spliced


def answers_of(client: Client, prompts: list[list[int]]) -> list[Answer]:
    """The answers to the prompts, one at a time; each prompt is counted once, and a flush forgets them."""
    before = client.counters()
    answers = [client.generate(prompt) for prompt in prompts]
    assert client.grown(before)["prompt_tokens"] == sum(map(len, prompts)), "audits are in no counter of requests"
    if "audit" in client.internal_state():
        client.audit()
    client.flush()
    assert client.generate(prompts[0]).cached_tokens == 0
    return answers


@pytest.mark.slow
@on_servers("smollm2_probed")
def test_a_corruption_is_found_and_its_namespace_goes_off_and_comes_back(client: Client) -> None:
    """With the default limits, real weights in bf16 and real text, at the first audits that may decide."""
    document = client.post("/tokenize", {"prompt": _BODY})["tokens"]

    def ask(number: int, namespace: str, *more: int, **options: Any) -> Answer:
        beginning = client.post("/tokenize", {"prompt": f"Record {number}, kept by clerk {number * 37 % 101}. "})
        tokens = [*beginning["tokens"], *document, *more]
        return client.generate(tokens, extra_key=namespace, max_new_tokens=1, **options)

    for namespace in ("good", "bad"):
        ask(0, namespace)
    for number in range(1, 16):
        ask(number, "bad", pic=_FLIP)
        if number % 4 == 0:
            ask(number, "good")
        client.audit()  # not too many wait
    assert client.audit()["suspended"] == [], "it takes 16"
    # The last audit is this request's own, which a step every 16 rounds decides long before its last token.
    answer = client.generate([*random_tokens(9, 40), *document], extra_key="bad", pic=_FLIP, max_new_tokens=_LONG)
    assert answer.chunk_hit_tokens > 100
    assert len(answer.ids) == _LONG, "what was running goes on"
    audit = client.audit()
    assert [shown["extra_key"] for shown in audit["suspended"]] == ["bad"]
    assert audit["suspended"][0]["num_audited"] == 16
    _, line, after = re.split(r"\n?(.*SPLICING IS OFF.*)\n", client.log())
    assert "extra_key='bad'" in line
    assert "audit_kl_limit" in line
    assert "Decode batch" in after, "and nothing else has decoded"

    before = client.counters()
    assert ask(1, "bad").cached_tokens == 0, "what was spliced is not a prefix hit either"
    again = ask(60, "bad")
    assert again.chunk_hit_tokens == 0
    assert again.cached_tokens < 20, "the words that both begin with, computed by the request before"
    assert client.grown(before)["fallbacks:audit"] == 2
    assert ask(61, "good").chunk_hit_tokens > 100
    turn = ask(61, "good", *random_tokens(8, 20))
    assert (turn.chunk_hit_tokens, turn.inherited_tokens > 100) == (0, True)
    windows = client.audit()["windows"]
    assert windows["inherited"]["num_audited"] == audit["windows"]["inherited"]["num_audited"] + 1
    assert total(client.server.get("/metrics"), "pic_audit_suspended_namespaces") == 1

    number = audit["suspended"][0]["number"]
    with pytest.raises(BenchError, match=rf"HTTP 400.*pic_audit_resume={number + 1}: refused"):
        resume(client, number + 1)
    assert resume(client, number) == [True]
    with pytest.raises(BenchError, match=r"HTTP 400.*a suspended namespace"):
        resume(client, number)  # It is on already.
    assert client.audit()["suspended"] == []
    assert ask(1, "bad").cached_tokens == 0, "it begins with an empty tree"
    assert ask(62, "bad").chunk_hit_tokens > 100
    assert client.audit()["suspended"] == []
    client.flush()


def resume(client: Client, number: int) -> list[bool]:
    """Ask for a namespace to be switched on again; the answer of each scheduler."""
    return client.post("/set_internal_state", {"server_args": {"pic_audit_resume": number}})


def total(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^sglang:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE))
