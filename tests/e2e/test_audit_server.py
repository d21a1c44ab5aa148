"""The live audit through a real server: users notice nothing, a corruption is found, its namespace comes back clean."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Answer, Client, random_tokens, serve

pytestmark = pytest.mark.e2e

_AUDITED = {"cost_gate": "off", "self_test": "off", "audit_rate": 1.0}
_LONG = 400
_FLIP = {"testing": {"flip_donors": True}}
_BODY = " ".join(f"Entry {i} lists {i * 7 % 31} bars of copper and {i * 13 % 17} of tin." for i in range(12))


def audit_of(client: Client) -> dict[str, Any]:
    """The audit's part of `/server_info`."""
    return json.loads(client.server.get("/server_info"))["internal_states"][0]["pic"]["audit"]


def settled(client: Client) -> dict[str, Any]:
    """The same, once nothing waits to be audited."""
    for _ in range(1200):
        audit = audit_of(client)
        if audit["num_pending"] == 0:
            return audit
        time.sleep(0.1)
    raise AssertionError(f"audits still wait: {audit}")


def shifted_prompts(count: int) -> list[list[int]]:
    """The same two documents behind ever new beginnings: each prompt but the first few is spliced."""
    documents = [random_tokens(seed, 300) for seed in (1, 2)]
    return [[*random_tokens(100 + i, 40), *documents[i % 2], *documents[(i + 1) % 2]] for i in range(count)]


def test_users_notice_nothing(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """The same answers, hits and counters as from a server without audits; every spliced request is audited."""
    prompts = shifted_prompts(10)
    answers: list[list[Answer]] = []
    for rate in (0.0, 1.0):
        args = ("--dtype", "float32", "--page-size", "16")
        with serve(model_dir("tiny-gqa"), tmp_path, *args, config={**_AUDITED, "audit_rate": rate}) as client:
            before = client.counters()["prompt_tokens"]
            answers.append([client.generate(prompt) for prompt in prompts])
            counted = client.counters()["prompt_tokens"] - before
            assert counted == sum(map(len, prompts)), "audits are in no counter of requests"
            if rate:
                num_spliced = sum(answer.chunk_hit_tokens > 0 for answer in answers[-1])
                audit = settled(client)
                assert num_spliced >= 8
                assert (audit["num_audited"], audit["num_skipped"]) == (num_spliced, 0)
                assert audit["suspended"] == []
                metrics = client.server.get("/metrics")
                assert total(metrics, "pic_audited_requests_total") == num_spliced
                assert total(metrics, "pic_audit_tokens_total") == 640 * num_spliced
                assert total(metrics, "pic_audit_kl_nats_count") == num_spliced
            else:
                assert "audit" not in json.loads(client.server.get("/server_info"))["internal_states"][0]["pic"]
            client.flush()
            assert client.generate(prompts[0]).cached_tokens == 0
    for plain, audited in zip(*answers, strict=True):
        assert plain == audited


def test_a_pool_that_is_far_too_small(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Audits, retractions and evictions want the same slots; requests get them, and every slot comes back."""
    prompts = shifted_prompts(24)
    with serve(
        model_dir("tiny-gqa"),
        tmp_path,
        *("--max-total-tokens", "2600", "--max-running-requests", "4", "--chunked-prefill-size", "192"),
        *("--schedule-conservativeness", "0.1", "--dtype", "float32"),
        config=_AUDITED,
    ) as client:
        with ThreadPoolExecutor(6) as pool:
            jobs = [pool.submit(client.generate, prompt, max_new_tokens=40) for prompt in prompts]
            client.post("/abort_request", {"abort_all": True})
            lengths = [len(job.result().ids) for job in jobs if job.exception() is None]
        assert sum(length == 40 for length in lengths) >= 12
        # In the middle of what is left to audit, if anything is: how far it came depends on the machine.
        client.flush()
        num_audited = audit_of(client)["num_audited"]
        assert client.generate(prompts[0]).cached_tokens == 0
        answers = [client.generate(prompt) for prompt in prompts[1:5]]
        assert any(answer.chunk_hit_tokens for answer in answers)
        assert settled(client)["num_audited"] > num_audited
        client.server.check_alive()
        log = client.server.log_path.read_text()
    assert "Traceback" not in log
    assert "leak" not in log.lower()


@pytest.fixture(scope="module")
def client(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serve(
        model_dir("smollm2"), tmp_path_factory.mktemp("server"), config=_AUDITED, probe={"request_options": True}
    ) as client:
        yield client


def test_a_corruption_is_found_and_its_namespace_goes_off_and_comes_back(client: Client) -> None:
    """With the default limits, real weights in bf16 and real text, within 50 audited requests."""
    document = client.post("/tokenize", {"prompt": _BODY})["tokens"]

    def ask(number: int, namespace: str, **options: Any) -> Answer:
        beginning = client.post("/tokenize", {"prompt": f"Record {number}, kept by clerk {number * 37 % 101}. "})
        return client.generate([*beginning["tokens"], *document], extra_key=namespace, max_new_tokens=1, **options)

    for namespace in ("good", "bad"):
        ask(0, namespace)
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, 51):
            ask(number, "bad", pic=_FLIP)
            if number % 4 == 0:
                ask(number, "good")
            if number == 12:
                settled(client)
                in_flight = pool.submit(ask_long, client, document)
            while (audit := audit_of(client))["num_pending"] > 2:
                time.sleep(0.1)
            if audit["suspended"]:
                break
        assert not in_flight.done()
        answer = in_flight.result()
        assert answer.chunk_hit_tokens > 100
        assert len(answer.ids) == _LONG, "what was running goes on"
    audit = settled(client)
    assert [shown["extra_key"] for shown in audit["suspended"]] == ["bad"]
    assert audit["suspended"][0]["num_audited"] <= 50
    (line,) = [line for line in client.server.log_path.read_text().splitlines() if "SPLICING IS OFF" in line]
    assert "extra_key='bad'" in line
    assert "audit_kl_limit" in line

    before = client.counters()
    assert ask(1, "bad").cached_tokens == 0, "what was spliced is not a prefix hit either"
    again = ask(60, "bad")
    assert again.chunk_hit_tokens == 0
    assert again.cached_tokens < 20, "the words that both begin with, computed by the request before"
    assert client.counters()["fallbacks:audit"] - before["fallbacks:audit"] == 2
    assert ask(61, "good").chunk_hit_tokens > 100
    assert total(client.server.get("/metrics"), "pic_audit_suspended_namespaces") == 1

    number = audit["suspended"][0]["number"]
    assert resume(client, number + 1) == [False]
    assert resume(client, number) == [True]
    assert resume(client, number) == [False], "it is on already"
    assert settled(client)["suspended"] == []
    assert ask(1, "bad").cached_tokens == 0, "it begins with an empty tree"
    assert ask(62, "bad").chunk_hit_tokens > 100
    assert settled(client)["suspended"] == []
    client.flush()


def test_keys_that_look_like_ours_are_refused(client: Client) -> None:
    with pytest.raises(Exception, match="HTTP 400"):
        client.generate([1, 2, 3], extra_key="a\x1fpic:1")


def ask_long(client: Client, document: list[int]) -> Answer:
    """A spliced request of the namespace that is going to be switched off, long enough to be running then."""
    return client.generate([*random_tokens(9, 40), *document], extra_key="bad", max_new_tokens=_LONG)


def resume(client: Client, number: int) -> list[bool]:
    """Ask for a namespace to be switched on again; the answer of each scheduler."""
    return client.post("/set_internal_state", {"server_args": {"pic_audit_resume": number}})


def total(metrics: str, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(float(value) for value in re.findall(rf"^sglang:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE))
