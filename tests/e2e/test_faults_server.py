"""Faults on a real server: requests are answered as with mode off, and counted; after the limit none is spliced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.e2e.faults import STAGES
from tests.e2e.servers import on_servers
from tests.e2e.serving import Answer, Client, divergence, random_tokens

pytestmark = pytest.mark.e2e

LIMIT = 8
"""`fault_limit` by default."""
# Behind the pass, whose splices are good.
_AFTERWARDS = ("publication", "pins", "audit")


def ask(client: Client, prompt: Sequence[int], fault: str | None = None, **pic: Any) -> Answer:
    """A greedy answer, with a fault at that stage."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    params = {"pic": pic} | ({} if fault is None else {"fault": fault})
    return client.generate(prompt, sampling_params={**sampling, "custom_params": params})


def faulted(client: Client, seed: int, stage: str) -> None:
    """A prompt that would be spliced has a fault there, and is answered as with mode off."""
    prompt = random_tokens(seed, 420)
    whole = ask(client, prompt, mode="off")
    ask(client, prompt)
    before = client.counters()
    pic = {"pin": "a"} if stage == "pins" else {}
    answer = ask(client, prompt, stage, **pic)
    assert answer.ids == whole.ids, stage
    assert divergence(whole.first_token, answer.first_token) < 1e-5, stage
    after = client.counters()
    reasons = {name: after[name] - before[name] for name in after if name.startswith("fallbacks:fault")}
    risen = {name: count for name, count in reasons.items() if count}
    assert risen == {f"fallbacks:{STAGES[stage]}": 1}, stage
    if stage not in _AFTERWARDS:
        assert answer.chunk_hit_tokens == 0, f"{stage}: nothing is said to be spliced"
        # Served with mode off, it has the prefix of the first answer.
        assert bool(answer.cached_tokens) == (stage == "options"), stage
        spliced = after["tokens:chunk"] - before["tokens:chunk"]
        assert spliced == after["undone_tokens"] - before["undone_tokens"], f"{stage}: what was counted is undone"
        assert bool(spliced) == (stage in ("lay_out", "splice", "narrow", "pass")), stage


@on_servers("gqa_page16")
def test_a_fault_at_any_stage_costs_reuse_and_no_answer(client: Client) -> None:
    for seed, stage in enumerate(STAGES):
        faulted(client, 900 + seed, stage)
        again = random_tokens(950 + seed, 420)
        ask(client, again)
        assert ask(client, again).chunk_hit_tokens > 0, f"after {stage} others are spliced"
        # SGLang checks every slot and every lock when it is idle, and flushes only then.
        client.flush()
        assert client.internal_state()["faults"]["num_faults"] == 0
    report = client.internal_state()["faults"]
    assert sum(report["by_reason"].values()) == len(STAGES)
    log = client.log()
    for reason in set(STAGES.values()):
        assert log.count(f"({reason})") == 1, "each reason is logged once"


@on_servers("gqa_page16")
def test_after_the_limit_nothing_is_spliced_until_a_flush(client: Client) -> None:
    prompt = random_tokens(980, 420)
    for seed in range(LIMIT):
        assert not client.internal_state()["faults"]["is_off"]
        ask(client, random_tokens(981 + seed, 200), "plan")
    report = client.internal_state()["faults"]
    assert (report["is_off"], report["num_faults"], report["limit"]) == (True, LIMIT, LIMIT)
    before = client.counters()
    answers = [ask(client, prompt) for _ in range(2)]
    assert [answer.chunk_hit_tokens for answer in answers] == [0, 0]
    after = client.counters()
    assert after["switched_off"] == 1
    assert after["fallbacks:faults"] - before["fallbacks:faults"] == 2
    assert client.log().count(f"splicing is switched off after {LIMIT} faults") == 1
    client.flush()
    assert client.counters()["switched_off"] == 0
    ask(client, prompt)
    assert ask(client, prompt).chunk_hit_tokens > 0


@on_servers("mla_page16_tp2")
def test_ranks_with_a_fault_at_the_same_stage_go_on(client: Client) -> None:
    for seed, stage in enumerate(("plan", "splice", "publication")):
        faulted(client, 990 + seed, stage)
