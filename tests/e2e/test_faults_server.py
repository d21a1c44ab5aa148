"""Faults on a real server: requests are answered as with mode off, and counted."""

from __future__ import annotations

import pytest

from tests.e2e.faults import STAGES
from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, assert_same, random_tokens

pytestmark = pytest.mark.e2e

# Behind the pass, whose splices are good.
_AFTERWARDS = ("publication", "pins", "audit")


def faulted(client: Client, seed: int, stage: str) -> None:
    """A prompt that would be spliced has a fault there, and is answered as with mode off."""
    prompt = random_tokens(seed, 420)
    whole = client.generate(prompt, pic={"mode": "off"})
    client.generate(prompt)
    before = client.counters()
    answer = client.generate(prompt, pic={"pin": "a"} if stage == "pins" else {}, fault=stage)
    assert_same(whole, answer)
    grown = client.grown(before)
    faults = {name: count for name, count in grown.items() if name.startswith("fallbacks:fault") and count}
    assert faults == {f"fallbacks:{STAGES[stage]}": 1}, stage
    if stage not in _AFTERWARDS:
        assert answer.chunk_hit_tokens == 0, f"{stage}: nothing is said to be spliced"
        # Served with mode off, it has the prefix of the first answer.
        assert bool(answer.cached_tokens) == (stage == "options"), stage
        assert grown["tokens:chunk"] == grown["undone_tokens"], f"{stage}: what was counted is undone"
        assert bool(grown["undone_tokens"]) == (stage in ("lay_out", "splice", "narrow", "pass")), stage


@on_servers("gqa_page16")
def test_a_fault_at_any_stage_costs_reuse_and_no_answer(client: Client) -> None:
    for seed, stage in enumerate(STAGES):
        faulted(client, 900 + seed, stage)
        again = random_tokens(950 + seed, 420)
        client.generate(again)
        assert client.generate(again).chunk_hit_tokens > 0, f"after {stage} others are spliced"
        # SGLang checks every slot and every lock when it is idle, and flushes only then.
        client.flush()
        assert client.internal_state()["faults"]["num_faults"] == 0
    report = client.internal_state()["faults"]
    assert sum(report["by_reason"].values()) == len(STAGES)
    log = client.log()
    for reason in set(STAGES.values()):
        assert log.count(f"({reason})") == 1, "each reason is logged once"


@on_servers("mla_page16_tp2")
def test_ranks_with_a_fault_at_the_same_stage_go_on(client: Client) -> None:
    for seed, stage in enumerate(("plan", "splice", "publication")):
        faulted(client, 990 + seed, stage)
