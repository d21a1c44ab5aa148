"""Features of SGLang with spliced prompts: a request is served from its own rows at shift 0, where a splice adds no
error, and answers as the same request does when it is computed in full."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_pic.errors import BenchError
from tests.e2e.servers import SERVERS, on_servers
from tests.e2e.serving import Client, random_tokens

pytestmark = [pytest.mark.e2e, on_servers("gqa_page16.lora")]

_MODEL = SERVERS["gqa_page16.lora"].model
_LEN = 300
_SCHEMA = {
    "type": "object",
    "properties": {"metal": {"enum": ["copper", "tin"]}, "is_wanted": {"type": "boolean"}},
    "required": ["metal", "is_wanted"],
    "additionalProperties": False,
}


def ask(client: Client, prompt: list[Any], sampling: dict[str, Any] | None = None, **body: Any) -> Any:
    """SGLang's whole answer, greedy unless `sampling` says otherwise."""
    params = {"temperature": 0, "max_new_tokens": 12, **(sampling or {})}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 3, **body}
    return client.post("/generate", body)


def computed_and_spliced(
    client: Client, seed: int, sampling: dict[str, Any] | None = None, **body: Any
) -> tuple[Any, Any]:
    """The answer to a request that opted out, and the answer that is spliced from the prompt's own chunks."""
    prompt = random_tokens(seed, _LEN)
    computed = ask(client, prompt, {**(sampling or {}), "custom_params": {"pic": {"mode": "off"}}}, **body)
    client.generate(prompt, max_new_tokens=1)
    return computed, ask(client, prompt, sampling, **body)


def spliced_tokens(answer: Any) -> int:
    return int((answer["meta_info"]["cached_tokens_details"] or {}).get("pic", 0))


def ids_of(answer: Any) -> list[int]:
    return [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]


def assert_alike(computed: Any, spliced: Any, *, name: str = "output") -> None:
    """Answers with the same tokens and, but for rounding, the same log-probabilities, also of the likeliest tokens."""
    assert spliced_tokens(spliced) >= _LEN - 32 - 16 - 64
    assert spliced_tokens(computed) == 0
    assert spliced["text"] == computed["text"]
    for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        one, other = (flat(answer["meta_info"].get(f"{name}_{kind}")) for answer in (computed, spliced))
        assert [token for _, token in other] == [token for _, token in one]
        assert [logprob for logprob, _ in other] == pytest.approx([logprob for logprob, _ in one], abs=1e-3)


def flat(entries: Any) -> list[tuple[float, int]]:
    """Pairs of log-probability and token, out of lists of any depth; a prompt's first token has no log-probability."""
    if entries and not isinstance(entries[0], list):
        return [] if entries[0] is None else [(entries[0], entries[1])]
    return [pair for entry in entries or () if entry for pair in flat(entry)]


@pytest.mark.feature("penalties and biases")
@pytest.mark.parametrize(
    "sampling",
    [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}, {"logit_bias": {"77": 30.0}}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_penalties_count_the_tokens_of_a_spliced_prompt(client: Client, sampling: dict[str, Any]) -> None:
    """A repetition penalty is of the whole prompt, the others of the answer so far."""
    computed, spliced = computed_and_spliced(client, 1, {**sampling, "max_new_tokens": 24, "ignore_eos": True})
    assert_alike(computed, spliced)
    if "logit_bias" in sampling:
        assert set(ids_of(spliced)) == {77}


@pytest.mark.feature("penalties and biases")
def test_min_new_tokens(client: Client) -> None:
    """A token that would end the answer comes no sooner than it may."""
    (stop,) = ids_of(ask(client, random_tokens(2, _LEN), {"max_new_tokens": 1}))
    sampling = {"stop_token_ids": [stop], "min_new_tokens": 5, "max_new_tokens": 8}
    computed, spliced = computed_and_spliced(client, 2, sampling)
    assert_alike(computed, spliced)
    assert stop not in ids_of(spliced)[:4]
    early = ask(client, random_tokens(2, _LEN), {**sampling, "min_new_tokens": 0})
    assert spliced_tokens(early) > 0
    assert ids_of(early) == [stop]


@pytest.mark.feature("structured output")
@pytest.mark.parametrize(
    ("grammar", "wanted"),
    [
        ({"regex": "(yes|no), [0-9]{3} bars"}, r"(yes|no), \d{3} bars$"),
        ({"ebnf": 'root ::= ("copper" | "tin") " is " ("cheap" | "dear")'}, "(copper|tin) is (cheap|dear)"),
        # The schema allows white space, and nothing tells a model of random weights to go on.
        ({"json_schema": json.dumps(_SCHEMA)}, r'\s*\{\s*("metal|$)'),
    ],
    ids=["regex", "ebnf", "json_schema"],
)
def test_structured_output_behind_a_spliced_prompt(client: Client, grammar: dict[str, str], wanted: str) -> None:
    computed, spliced = computed_and_spliced(client, 3, {**grammar, "max_new_tokens": 60})
    assert_alike(computed, spliced)
    assert re.match(wanted, spliced["text"])


@pytest.mark.feature("logprobs of the answer", "chunked prefill", "overlap schedule", "tensor parallelism of 1")
def test_logprobs_of_an_answer(client: Client) -> None:
    asked = {"top_logprobs_num": 5, "token_ids_logprob": [5, 77, 4000]}
    computed, spliced = computed_and_spliced(client, 4, {"ignore_eos": True}, **asked)
    assert_alike(computed, spliced)
    assert len(flat(spliced["meta_info"]["output_top_logprobs"])) == 5 * 12
    assert len(flat(spliced["meta_info"]["output_token_ids_logprobs"])) == 3 * 12


@pytest.mark.feature("logprobs of the prompt")
def test_logprobs_of_a_prompts_end(client: Client) -> None:
    """With the likeliest tokens of each position, from `logprob_start_len` on."""
    computed, spliced = computed_and_spliced(client, 5, logprob_start_len=_LEN - 60)
    assert_alike(computed, spliced)
    assert_alike(computed, spliced, name="input")
    assert len(flat(spliced["meta_info"]["input_token_logprobs"])) >= 59


@pytest.mark.feature("parallel sampling")
def test_parallel_samples_of_a_spliced_prompt(client: Client) -> None:
    computed, spliced = computed_and_spliced(client, 6, {"n": 3, "ignore_eos": True})
    assert len(computed) == len(spliced) == 3
    for one, other in zip(computed, spliced, strict=True):
        assert_alike(one, other)


@pytest.mark.feature("input embeddings")
def test_input_embeddings_are_refused_by_sglang_itself(client: Client) -> None:
    """The plugin sees such requests under stock flags only where SGLang takes them: without a radix cache."""
    with pytest.raises(BenchError, match=r"HTTP 400[\s\S]*--disable-radix-cache"):
        client.post("/generate", {"input_embeds": [[0.0] * 256] * 8, "sampling_params": {"max_new_tokens": 1}})
    client.server.check_alive()


@pytest.fixture
def other_weights(client: Client, model_dir: Callable[[str], Path], tmp_path: Path) -> Iterator[Path]:
    """A folder with other weights of the model; afterwards the server has its own again."""
    from safetensors.torch import load_file, save_file

    own, other = model_dir(_MODEL), tmp_path / "other"
    shutil.copytree(own, other)
    weights = load_file(other / "model.safetensors")
    for name, weight in weights.items():
        if "v_proj" in name:
            weights[name] = weight.flip(0).contiguous()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    yield other
    client.post("/update_weights_from_disk", {"model_path": str(own)})


@pytest.mark.feature("new weights")
@pytest.mark.parametrize("flush", [True, False], ids=["flushed", "kept"])
def test_no_donor_outlives_its_weights(client: Client, other_weights: Path, flush: bool) -> None:
    """Where SGLang is told to keep the cache, it keeps prefixes; rows of other weights are spliced in no case."""
    old, spliced = computed_and_spliced(client, 7)
    assert_alike(old, spliced)
    client.generate(random_tokens(8, _LEN), pic={"pin": "old"})
    client.post("/update_weights_from_disk", {"model_path": str(other_weights), "flush_cache": flush})
    assert client.internal_state()["pins"]["held"] == []
    moved = [*random_tokens(9, 40), *random_tokens(7, _LEN)]
    assert client.generate(moved).chunk_hit_tokens == 0
    client.flush()
    new, spliced = computed_and_spliced(client, 7)
    assert_alike(new, spliced)
    assert ids_of(new) != ids_of(old)


@pytest.mark.feature("new weights")
def test_no_donor_outlives_a_session_of_updates(client: Client) -> None:
    """Weights that come as tensors or over a group come between these two calls; here none did."""
    computed, spliced = computed_and_spliced(client, 10)
    assert_alike(computed, spliced)
    client.post("/begin_weight_update", {})
    client.post("/end_weight_update", {})
    again = ask(client, random_tokens(10, _LEN))
    assert spliced_tokens(again) == 0
    assert ids_of(again) == ids_of(computed)


@pytest.mark.feature("structured output", "penalties and biases", "parallel sampling")
def test_audits_of_such_requests_find_nothing(client: Client) -> None:
    """Sampling changes logits in place; an audit compares those that the model gave."""
    before = client.audit()
    for seed, sampling in enumerate(({"regex": "[0-9]{3}"}, {"logit_bias": {"77": 30.0}}, {"n": 2}), 20):
        computed_and_spliced(client, seed, sampling)
    after = client.audit()
    num_audited, num_agreed = (after[name] - before[name] for name in ("num_audited", "num_agreed"))
    assert num_agreed == num_audited >= 4
