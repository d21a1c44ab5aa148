"""Prefill and decode on servers of their own: rows arrive as they were sent, and answers are those of one server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import pd_plugin
from tests.e2e.pairs import Pair, a_pair, assert_arrived, torch_equal
from tests.e2e.servers import on_servers
from tests.e2e.serving import Answer, Client, assert_same, random_tokens, wait_until

# Beside the tests of the shared server, so that the two servers are started once.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.feature("PD disaggregation"), on_servers("gqa_page16")]

_NOBODY = "2.2.2.2"
"""To SGLang, a decode server that takes nothing."""


def _mooncake() -> tuple[str, ...]:
    """Nothing to call for Mooncake's own engine, where the package is installed and loads."""
    found = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        reason = found.stderr.strip().splitlines()[-1]
        pytest.skip(f"mooncake.engine: {reason}; pip install mooncake-transfer-engine-non-cuda, and libibverbs1")
    return ()


@pytest.fixture(scope="module", params=["stand_in", "mooncake"])
def start(
    request: pytest.FixtureRequest, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Pair]]:
    """Starts both servers, once, with the model and the settings of the shared server `gqa_page16`."""
    engine = (pd_plugin.STAND_IN,) if request.param == "stand_in" else _mooncake()
    with ExitStack() as stack:
        yield cache(
            lambda: stack.enter_context(a_pair("gqa_page16", model_dir, tmp_path_factory.mktemp("pd"), *engine))
        )


@pytest.fixture
def pair(servers: tuple[str, ...], start: Callable[[], Pair]) -> Pair:
    """The running servers; `servers` says where a test stands among the others."""
    return start()


def test_spliced_rows_arrive_and_answers_are_those_of_one_server(client: Client, start: Callable[[], Pair]) -> None:
    """Prompts below and above a prefill chunk, of moved text behind and before new text."""
    donor = random_tokens(1, 500)
    fresh = random_tokens(2, 200)
    prompts = [
        donor,
        [*fresh[:40], *donor[40:180]],
        [*fresh[50:90], *donor[40:420], *fresh[90:140], *donor[420:500]],
        random_tokens(3, 130),
    ]
    answers = [client.generate(prompt) for prompt in prompts]
    pair = start()
    for prompt, alone in zip(prompts, answers, strict=True):
        answer, rows = pair.generate(prompt)
        assert_arrived(rows)
        assert_same(alone, answer)
        assert (answer.cached_tokens, answer.chunk_hit_tokens) == (alone.cached_tokens, alone.chunk_hit_tokens)
        spliced = sum(end - start for start, end in rows["sent"]["spliced"])
        assert spliced == answer.chunk_hit_tokens
        assert (spliced > 100) == (prompt in prompts[1:3])
    audit = pair.prefill.audit()
    assert (audit["num_audited"], audit["num_skipped"]) == (2, 0)


def test_a_decode_servers_own_rows_are_kept_apart(pair: Pair) -> None:
    """What it was sent of a spliced prompt is a prefix of later ones, but of none that opted out."""
    donor = random_tokens(11, 400)
    pair.generate(donor)
    prompt = [*random_tokens(12, 40), *donor[40:360]]
    first, sent = pair.generate(prompt)
    assert first.chunk_hit_tokens > 200
    assert sent["received"]["prefix_len"] == 0
    _, rows = pair.generate(prompt)
    assert rows["received"]["prefix_len"] >= 336
    assert_arrived(rows)
    for is_known in (False, True):
        off, rows = pair.generate(prompt, pic={"mode": "off"})
        assert (rows["received"]["prefix_len"] >= 336) == is_known, "its own rows, and nobody else's"
        assert is_known or rows["received"]["prefix_len"] == 0
        assert rows["sent"]["spliced"] == []
        assert_arrived(rows)
        assert not torch_equal(rows, sent), "a splice leaves its marks in the rows"
        assert off.chunk_hit_tokens == 0


def test_a_prompt_that_is_computed_again_is_not_refused(pair: Pair) -> None:
    """As after new weights: the decode server gives its rows up, and has the prefill server compute them again."""

    def give_up(room: int) -> None:
        wait_until((pair.rows / f"{room}.received").exists)
        pair.decode.post("/pause_generation", {"mode": "retract"})
        for name in ("sent", "received"):
            (pair.rows / f"{room}.{name}").unlink()
        pair.decode.post("/continue_generation", {"torch_empty_cache": False})

    for number, pic in enumerate([{"mode": "off"}, {"edit": "recompile"}]):
        prompt = random_tokens(31 + number, 130)
        options: dict[str, Any] = {"pic": pic, "extra_key": "k", "max_new_tokens": 150}
        whole, _ = pair.generate(prompt, **options)
        again, rows = pair.generate(prompt, **options, meanwhile=give_up)
        assert again.ids == whole.ids
        # What is computed again is the prompt and the answer so far.
        rows["sent"]["rows"] = [layer[: len(prompt)] for layer in rows["sent"]["rows"]]
        assert_arrived(rows)


def test_a_prefill_server_whose_rows_nobody_takes(pair: Pair) -> None:
    """With SGLang's fake transfer, which keeps a prompt out of the tree; its donors came another way."""
    donor = random_tokens(21, 300)
    pair.generate(donor, pic={"pin": "kept"})
    assert [pin["name"] for pin in pair.prefill.internal_state()["pins"]["held"]] == ["kept"]
    moved = [*random_tokens(22, 40), *donor[40:]]

    def ask(**options: Any) -> Answer:
        where = {"bootstrap_host": _NOBODY, "bootstrap_port": pair.port, "bootstrap_room": next(pair.rooms)}
        return pair.prefill.generate(moved, max_new_tokens=1, **where, **options)

    spliced = ask()
    assert spliced.chunk_hit_tokens > 200
    assert ask(pic={"mode": "off"}).chunk_hit_tokens == 0
    sent, _ = pair.generate(moved, pic={"unpin": "kept"})
    assert (sent.chunk_hit_tokens, sent.ids[0]) == (spliced.chunk_hit_tokens, spliced.ids[0])
    assert pair.prefill.internal_state()["pins"]["held"] == []
