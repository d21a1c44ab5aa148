"""Documents in another order on a server with `core.reordered: attend`."""

from __future__ import annotations

import pytest

from tests.e2e.servers import on_each_server
from tests.e2e.serving import Client, assert_same, leave_for_the_host, random_tokens

pytestmark = [pytest.mark.e2e]
on_all_servers = on_each_server("gqa_page16.attend", "gqa_page16.attend_host", "gqa_page1.attend_tp2")

DOCUMENTS = [random_tokens(20 + at, length) for at, length in enumerate((150, 120, 180, 90))]
QUESTION = random_tokens(40, 40)


def prompt(seed: int, *order: int) -> list[int]:
    return [*random_tokens(seed, 60), *(token for at in order for token in DOCUMENTS[at]), *QUESTION]


@on_all_servers
def test_reordered_documents_are_spliced_and_one_is_computed_again(client: Client) -> None:
    client.generate(prompt(1, 0, 1, 2, 3))
    before = client.counters()
    answer = client.generate(prompt(2, 3, 1, 0, 2))
    grown = client.grown(before)
    again = grown["attended_tokens"]
    assert again > 50
    assert answer.chunk_hit_tokens == grown["tokens:chunk"] - again > 250
    assert answer.cached_tokens == answer.chunk_hit_tokens
    # The prompt is an exact prefix now, and what was spliced of it has approximate rows.
    more = client.generate([*prompt(2, 3, 1, 0, 2), *random_tokens(3, 30)])
    assert (more.chunk_hit_tokens, more.inherited_tokens > 0) == (0, True)


@pytest.mark.feature("HiCache", "LoRA adapters")
@on_each_server("gqa_page16.attend_host")
def test_documents_come_from_the_host_and_belong_to_an_adapter(client: Client, adapters: list[str | None]) -> None:
    """To the last bit as from the device; another adapter has none of them."""
    one, two, _ = adapters
    answers = []
    for on_host in (False, True):
        client.flush()
        client.generate(prompt(1, 0, 1, 2, 3), lora_path=one)
        if on_host:
            leave_for_the_host(client)
        before = client.counters()
        answers.append(client.generate(prompt(2, 3, 1, 0, 2), lora_path=one))
        assert client.grown(before)["attended_tokens"] > 50
    device, host = answers
    assert device.fetched_tokens == 0 < host.fetched_tokens
    assert host.chunk_hit_tokens == device.chunk_hit_tokens > 250
    assert_same(device, host)
    assert client.generate(prompt(2, 3, 1, 0, 2), lora_path=two).cached_tokens == 0


@on_all_servers
def test_two_documents_leave_nothing_to_choose(client: Client) -> None:
    client.generate(prompt(1, 0, 1, 2, 3))
    assert client.generate(prompt(4, 1, 0)).chunk_hit_tokens == 0


@on_all_servers
def test_documents_in_another_prefill_chunk_than_the_end_that_asks_are_computed(client: Client) -> None:
    client.generate(prompt(1, 0, 1, 2, 3))
    before = client.counters()
    asked = [*prompt(6, 3, 1, 0, 2)[: -len(QUESTION)], *random_tokens(5, 1100), *QUESTION]
    assert client.generate(asked).chunk_hit_tokens == 0
    assert client.grown(before)["attended_tokens"] == 0


@on_all_servers
def test_requests_in_one_batch_and_logprobs_of_the_prompts_end(client: Client) -> None:
    client.generate(prompt(1, 0, 1, 2, 3))
    prompts = [prompt(7, 3, 1, 0, 2), random_tokens(8, 100), prompt(9, 2, 0, 3, 1), prompt(10, 0, 1, 2, 3)]
    alone = [client.generate(each, pic={"mode": "off"}) for each in prompts]
    before = client.counters()
    answers = client.generate_all(prompts)
    assert client.grown(before)["attended_tokens"] > 100
    # A plain prompt beside them gets its own answer.
    assert answers[1].ids == alone[1].ids
    start = len(prompts[0]) - 20
    again = client.generate(prompt(11, 1, 3, 2, 0), logprob_start_len=start)
    assert len(again.input_logprobs) == 20 - 1
    assert again.chunk_hit_tokens > 0


@on_all_servers
def test_audits_see_the_second_pass(client: Client) -> None:
    client.generate(prompt(1, 0, 1, 2, 3))
    before = client.audit()
    client.generate(prompt(12, 3, 1, 0, 2))
    after = client.audit()
    assert after["num_audited"] - before["num_audited"] == round(client.internal_state()["config"]["audit_rate"])
