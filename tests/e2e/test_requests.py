"""What clients see: chunk hits in every kind of response, counters, strict requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pic_bench.compare.server import request
from pic_traces.replay.client import read_events

from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, divergence, random_tokens

pytestmark = [pytest.mark.e2e, on_servers("smollm2")]

_BODY = " ".join(f"Entry {i} lists {i * 7 % 31} bars of copper and {i * 13 % 17} of tin." for i in range(30))


@pytest.mark.feature("streamed answers")
def test_shifted_text_is_a_chunk_hit_in_every_response(client: Client) -> None:
    client.post("/v1/chat/completions", _chat("It is noon. " + _BODY))
    answer = client.post("/v1/chat/completions", _chat("It is one minute past noon. " + _BODY))
    details = answer["sglext"]["cached_tokens_details"]
    assert details["pic"] > 200
    assert {"pic_behind_change", "pic_guarded"} < details.keys()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == details["device"] > details["pic"]

    events = _stream(client, _chat("Evening has come by now. " + _BODY, stream=True))
    streamed = [event["sglext"] for event in events if event.get("sglext")]
    assert streamed[-1]["cached_tokens_details"]["pic"] > 200

    native = client.post(
        "/generate", {"text": "It is midnight already. " + _BODY, "sampling_params": {"max_new_tokens": 1}}
    )
    meta = native["meta_info"]
    details = meta["cached_tokens_details"]
    assert details["pic"] > 200
    assert meta["cached_tokens"] == sum(details.get(source, 0) for source in ("device", "host", "storage"))


@pytest.mark.feature("requests that opt out")
def test_strict_requests_never_meet_spliced_rows(client: Client) -> None:
    """A row that was spliced is an ordinary prefix for later turns, but a strict request computes it anew."""
    donor = random_tokens(5, 300)
    client.generate(donor, pic={"mode": "off"})
    shifted = [*random_tokens(6, 40), *donor]
    assert client.generate(shifted).cached_tokens == 0, "a strict request donates nothing"
    client.generate(donor)
    again = [*random_tokens(7, 40), *donor]
    assert client.generate(again).chunk_hit_tokens > 200
    strict = client.generate(again, pic={"mode": "off"})
    assert strict.cached_tokens == 0
    assert client.generate(again).cached_tokens == len(again) - 1, "for others the spliced row is a prefix hit"
    assert client.generate(again, pic={"mode": "off"}).cached_tokens == len(again) - 1, "strict rows serve strict ones"


@pytest.mark.feature("logprobs of the whole prompt")
def test_input_logprobs_are_computed(client: Client) -> None:
    prompt = random_tokens(8, 300)
    client.generate(prompt)
    before = client.counters()
    answer = client.generate([*random_tokens(9, 40), *prompt], logprob_start_len=0)
    assert answer.cached_tokens == 0
    assert client.grown(before)["fallbacks:input_logprobs"] == 1


@pytest.mark.feature("logprobs of the prompt")
def test_where_input_logprobs_begin_nothing_is_spliced(client: Client) -> None:
    """Before that position runs are used; from it on every token is computed, and its logprob is a full prefill's."""
    prompt = random_tokens(18, 300)
    client.generate(prompt)
    shifted = [*random_tokens(19, 40), *prompt]
    start = len(shifted) - 60
    spliced = client.generate(shifted, logprob_start_len=start)
    assert spliced.chunk_hit_tokens == start - (40 + 32) - 1, "the sink of the donor and the seam are computed"
    full = client.generate(shifted, pic={"mode": "off"}, logprob_start_len=start)
    assert len(spliced.input_logprobs) == len(full.input_logprobs) >= 59
    apart = [abs(a - b) for a, b in zip(spliced.input_logprobs, full.input_logprobs, strict=True)]
    assert sorted(apart)[len(apart) // 2] < 0.3


@pytest.mark.feature("hidden states")
@pytest.mark.parametrize("placed_first", [True, False])
def test_what_is_counted_beside_hidden_states_happens(client: Client, placed_first: bool) -> None:
    """Hidden states are taken by place in the whole batch, which cannot be narrowed: nothing in it is spliced. Where
    splices come first, the request waits for another batch."""
    donor, placed = random_tokens(80 + placed_first, 300), random_tokens(90 + placed_first, 200)
    client.generate(donor)
    shifted = [*random_tokens(95 + placed_first, 40), *donor]
    before = client.counters()
    both = [(placed, True), (shifted, False)] if placed_first else [(shifted, False), (placed, True)]
    answers = client.post(
        "/generate",
        {
            "input_ids": [prompt for prompt, _ in both],
            "return_hidden_states": [wanted for _, wanted in both],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        },
    )
    metas = {wanted: answer["meta_info"] for (_, wanted), answer in zip(both, answers, strict=True)}
    grown = client.grown(before)
    assert len(metas[True]["hidden_states"][0]) == len(placed)
    num_spliced = 0 if placed_first else 300 - 32 - 1 - 1
    assert metas[False]["cached_tokens"] == num_spliced == grown["tokens:chunk"]
    assert grown["tokens:computed"] == len(placed) + len(shifted) - num_spliced
    assert (grown["fallbacks:batch"], grown["fallbacks:hidden_states"]) == (int(placed_first), 1)


@pytest.mark.feature("streaming sessions")
def test_a_streaming_session_is_computed_and_counted(client: Client) -> None:
    """Each turn, also where the text before it is a donor's; the answers are those of whole prompts."""
    donor, later = random_tokens(120, 300), random_tokens(121, 30)
    client.generate(donor)
    first = [*random_tokens(122, 40), *donor]
    before = client.counters()
    session = {"id": json.loads(client.post("/open_session", {"capacity_of_str_len": 4096, "streaming": True}))}
    turns = [client.generate(prompt, session_params=session) for prompt in (first, later)]
    grown = client.grown(before)
    assert (grown["fallbacks:session"], grown["tokens:chunk"]) == (2, 0)
    assert turns[1].cached_tokens >= len(first)
    client.post("/close_session", {"session_id": session["id"]})
    whole = [first, [*first, *turns[0].ids, *later]]
    for prompt, turn in zip(whole, turns, strict=True):
        full = client.generate(prompt, pic={"mode": "off"})
        assert divergence(full.first_token, turn.first_token) < 0.05
    client.flush()
    assert client.faults() == ""


def test_a_shifted_answer_stays_close(client: Client) -> None:
    """Real weights, real text: the greedy answer after a shift is the one a full prefill gives."""
    document = "The harbour of Velm was built in 1871 by the engineer Ada Brink. " * 3 + _BODY
    question = " Question: Who built the harbour of Velm? Answer: The engineer"
    tokenize = client.post("/tokenize", {"prompt": "Notes. " + document + question})["tokens"]
    shifted = client.post("/tokenize", {"prompt": "These are some other notes. " + document + question})["tokens"]
    client.generate(tokenize)
    spliced = client.generate(shifted)
    full = client.generate(shifted, pic={"mode": "off"})
    assert spliced.chunk_hit_tokens > 300
    assert divergence(full.first_token, spliced.first_token) < 0.05
    assert spliced.ids[0] == full.ids[0]


def _chat(text: str, **body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    common = {"max_tokens": 2, "temperature": 0, "return_cached_tokens_details": True}
    return {"model": "m", "messages": [message], **common, **body}


def _stream(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with request(client.server.base_url + "/v1/chat/completions", body, timeout_s=300) as answer:
        return [json.loads(event) for event in read_events(answer) if event != b"[DONE]"]
