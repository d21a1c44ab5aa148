"""A model with recurrent state beside stock SGLang: states at places of our choice change hits, and no answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.servers import SERVERS, on_servers
from tests.e2e.serving import Answer, Client, greedy, random_tokens, serve

pytestmark = pytest.mark.e2e

_HEAD = random_tokens(1, 450)
_FORK = 512
"""Where prompts part behind a clock and this head, on the grid of states."""


def prompt_of(clock: int, task: int) -> list[int]:
    return [*random_tokens(100 + clock, 70), *_HEAD, *random_tokens(1000 + 10 * clock + task, 90)]


def states_in_tree(client: Client) -> float:
    """States that no request uses, when the last batch was made."""
    (found,) = re.findall(r"^sglang:mamba_evictable_tokens\{.*\} (\S+)$", client.server.get("/metrics"), re.MULTILINE)
    return float(found)


@pytest.mark.feature("recurrent state")
@on_servers("qwen3_next")
def test_hybrids_hit_at_a_fork_a_prompt_earlier_and_answer_as_stock(
    model_dir: Callable[[str], Path], tmp_path: Path, client_of: Callable[[str], Client]
) -> None:
    """Three prompts behind each of three clocks; then the same all at once, some aborted, with room for few states."""
    args = SERVERS["qwen3_next"].args
    prompts = [prompt_of(clock, task) for clock in range(3) for task in range(3)]
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        server = serve(model_dir("tiny-qwen3-next"), tmp_path, *args, backend=None)
        starting = pool.submit(stack.enter_context, server)
        client = client_of("qwen3_next")
        stock = starting.result()
        expected = [stock.generate(prompt, max_new_tokens=12) for prompt in prompts]
        num_states = states_in_tree(stock)
    answers = [client.generate(prompt, max_new_tokens=12) for prompt in prompts]
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert [answer.cached_tokens for answer in expected] == [0, 0, _FORK] * 3
    assert [answer.cached_tokens for answer in answers] == [0, 0, _FORK, *[0, _FORK, _FORK] * 2]
    assert states_in_tree(client) <= num_states
    counters = client.counters()
    found = [counters[f"state_checkpoints:{event}"] for event in ("asked", "kept", "hit", "fault")]
    assert found == [2, 2, 4, 0]

    with ThreadPoolExecutor(6) as pool:
        again = list(pool.map(lambda job: _generate(client, *job), enumerate([*prompts, *prompts])))
    told = [answer.ids for answer in expected] * 2
    assert [ids for ids in again if ids is not None] == [ids for i, ids in enumerate(told) if not _is_aborted(i)]
    client.flush()
    assert client.generate(prompts[0], max_new_tokens=12).cached_tokens == 0
    assert client.counters()["state_checkpoints:fault"] == 0
    assert client.faults() == ""


def _is_aborted(number: int) -> bool:
    return number % 4 == 3


def _generate(client: Client, number: int, prompt: list[int]) -> list[int] | None:
    """The answer; every fourth request is aborted at some moment of its life."""
    if not _is_aborted(number):
        answer: Answer = client.generate(prompt, max_new_tokens=12)
        return answer.ids
    body = {"input_ids": prompt, "rid": f"request-{number}", "sampling_params": greedy(40)}
    with ThreadPoolExecutor(1) as aborter:
        aborter.submit(client.post, "/abort_request", {"rid": body["rid"]})
        client.post("/generate", body)
    return None
