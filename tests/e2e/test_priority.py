"""Priority scheduling: a request that others make room for is planned again when its turn comes, and answers alike.

The server has pages of 64 and rows in FP8, which no other server of the tests has.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, greedy, random_tokens, wait_until

pytestmark = pytest.mark.e2e

# Rounds of decoding: the third request is there long before the first two have ended.
_LONG, _SHORT = 400, 8


@pytest.mark.feature("priority scheduling", "rows of float8_e4m3fn", "pages of any other size")
@on_servers("gqa_page64_fp8")
def test_a_request_that_was_preempted_is_planned_again(client: Client) -> None:
    """Two may run, and both are spliced; then a third comes that matters more, and is spliced as well."""

    def ask(prompt: list[int], new_tokens: int, priority: int, **pic: Any) -> Any:
        sampling = greedy(new_tokens, pic=pic)
        return client.post("/generate", {"input_ids": prompt, "sampling_params": sampling, "priority": priority})

    *lower, higher = (random_tokens(seed, 300) for seed in (70, 71, 72))
    jobs = [*((prompt, _LONG, 0) for prompt in lower), (higher, _SHORT, 1)]
    computed = [ask(*job, mode="off")["output_ids"] for job in jobs]
    for prompt in (*lower, higher):
        client.generate(prompt, max_new_tokens=1)
    before = client.counters()
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(ask, *job) for job in jobs[:2]]
        wait_until(lambda: client.grown(before)["prompt_tokens"] >= sum(map(len, lower)))
        answers = [pool.submit(ask, *jobs[2]), *running]
        first, *others = [answer.result() for answer in answers]
    assert [answer["output_ids"] for answer in (*others, first)] == computed
    preempted = [answer["meta_info"]["num_retractions"] for answer in others]
    assert sorted(preempted) == [0, 1]
    assert first["meta_info"]["e2e_latency"] < min(answer["meta_info"]["e2e_latency"] for answer in others)
    for answer in (first, *others):
        assert answer["meta_info"]["cached_tokens_details"]["pic"] >= 128
    client.flush()
    assert client.faults() == ""
