"""LoRA adapters: a prompt is spliced from rows of its own adapter, answers as if it were computed in full, and takes
nothing from another adapter or the model without one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pic_models.lora_adapter import write_adapter

from tests.e2e.servers import on_servers
from tests.e2e.serving import Answer, Client, assert_same, greedy, random_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.feature("LoRA adapters"), on_servers("gqa_page16.lora")]

_LEN = 300
_OFF = {"mode": "off"}
# All but the sink, the last token and a partial page.
_AT_LEAST = _LEN - 32 - 16 - 1


def test_an_adapters_rows_serve_it_and_nobody_else(client: Client, adapters: list[str | None]) -> None:
    """At shift 0, where a splice adds no error; each adapter answers in its own way."""
    prompt = random_tokens(1, _LEN)
    answers = []
    for name in adapters:
        full = client.generate(prompt, lora_path=name)
        assert full.cached_tokens == 0, "rows of another adapter, or of none, are not its rows"
        spliced = client.generate(prompt, lora_path=name)
        assert spliced.chunk_hit_tokens >= _AT_LEAST
        assert_same(full, spliced)
        answers.append(full)
    assert len({tuple(answer.ids) for answer in answers}) == 3


def test_adapters_side_by_side_answer_as_each_alone(client: Client, adapters: list[str | None]) -> None:
    """One batch of gaps: runs of every adapter beside prompts that have none, and text that has moved."""
    order = [adapters[i % 3] for i in range(7)]
    known = [random_tokens(10 + i, _LEN) for i in range(7)]
    alone = [client.generate(prompt, pic=_OFF, lora_path=name) for prompt, name in zip(known, order, strict=True)]
    for prompt, name in zip(known[:5], order, strict=False):
        client.generate(prompt, lora_path=name, max_new_tokens=1)
    moved = [[*random_tokens(20 + i, 40), *known[i][40:]] for i in range(3)]
    together = batch(client, [*known, *moved], [*order, *order[:3]])
    for answer, full in zip(together, alone, strict=False):
        assert_same(full, answer)
    assert [answer.chunk_hit_tokens >= _AT_LEAST for answer in together[:7]] == [True] * 5 + [False] * 2
    assert all(answer.chunk_hit_tokens >= _AT_LEAST - 40 for answer in together[7:])


def batch(client: Client, prompts: list[list[int]], names: list[str | None]) -> list[Answer]:
    body = {"input_ids": prompts, "lora_path": names, "sampling_params": greedy(8)}
    results = client.post("/generate", {**body, "return_logprob": True, "top_logprobs_num": 20})
    return [Client.answer(result) for result in results]


def test_audits_compute_with_the_requests_adapter(client: Client, adapters: list[str | None]) -> None:
    """Every spliced request of this server is audited."""
    before = client.audit()
    for seed, name in enumerate(adapters):
        prompt = random_tokens(30 + seed, _LEN)
        for _ in range(2):
            client.generate(prompt, lora_path=name, max_new_tokens=1)
    after = client.audit()
    assert after["num_audited"] - before["num_audited"] == after["num_agreed"] - before["num_agreed"] == 3
    assert after["num_skipped"] == before["num_skipped"]


def test_pins_end_with_their_adapter(client: Client, tmp_path: Path, model_dir: Callable[[str], Path]) -> None:
    """No request could drop them: an adapter that is loaded under the same name is another one."""
    name, folder = "passing", str(write_adapter(tmp_path / "passing", 7, model_dir("tiny-gqa")))
    prompt = random_tokens(40, _LEN)
    client.post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
    client.generate(prompt, pic={"pin": "theirs"}, lora_path=name)
    client.generate(random_tokens(41, _LEN), pic={"pin": "ours"})
    theirs, ours = client.internal_state()["pins"]["held"]
    assert (theirs["name"], ours["name"], ours["extra_key"]) == ("theirs", "ours", None)
    assert re.fullmatch("[0-9a-f]{32}", theirs["extra_key"]), "the adapter's id without a mark of ours"
    client.post("/unload_lora_adapter", {"lora_name": name})
    assert [pin["name"] for pin in client.internal_state()["pins"]["held"]] == ["ours"]
    client.post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
    assert client.generate(prompt, lora_path=name).cached_tokens == 0
    client.post("/unload_lora_adapter", {"lora_name": name})
