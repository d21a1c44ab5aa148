"""What clients see: chunk hits in every kind of response, counters, strict requests."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pic_bench.compare.server import request
from pic_replay.client import read_events

from sglang_pic import __version__
from sglang_pic.adapter.namespace import KEY_MARK
from sglang_pic.adapter.serve.modes import SWITCH_KEY
from sglang_pic.cli import main
from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, divergence, entries, random_tokens, wait_until

pytestmark = [pytest.mark.e2e, on_servers("text")]

_BODY = entries(30)


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

    opted_out = client.post("/v1/chat/completions", _chat("Dawn. " + _BODY, custom_params={"pic": {"mode": "off"}}))
    details = opted_out["sglext"]["cached_tokens_details"]
    assert (details["device"], details["pic"], details["pic_reason"]) == (0, 0, "off")


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


def test_check_compares_cold_prompts_with_cached_ones(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """Of requests that opt out, which are exact."""
    trace = "gen:agent_meta?header=0&body=100&calls=2&sessions=2"
    words = [client.server.base_url, trace, "--max-tokens", "4", "--json"]
    assert main(["check", *words, "--extra-body", '{"custom_params": {"pic": {"mode": "off"}}}']) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cold"], found["num_top"], found["wrong"]) == ("a cache_salt of its own", 20, [])
    assert all(pair["prompt_tokens"] - pair["cached_tokens"] == 1 for pair in found["again"])
    assert [pair["call"] for pair in found["grown"]] == [1, 1]
    assert all(100 < pair["cached_tokens"] < pair["prompt_tokens"] - 1 for pair in found["grown"])
    assert {pair["cached_tokens"] for pair in found["noise"]} == {0}


_ENDPOINTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/generate": lambda text: {"text": text, "sampling_params": {"max_new_tokens": 1}},
    "/v1/chat/completions": lambda text: {"model": "m", "messages": _user(text), "max_tokens": 1},
    "/v1/completions": lambda text: {"model": "m", "prompt": text, "max_tokens": 1},
    "/v1/messages": lambda text: {"model": "m", "messages": _user(text), "max_tokens": 1},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 8, "store": False},
    "/v1/score": lambda text: {"model": "m", "query": text, "items": [" one"], "label_token_ids": [500, 600]},
    "/v1/decisions": lambda text: {"input": text, "questions": [{"id": "q", "type": "yes_no", "question": "Is it?"}]},
    "/invocations": lambda text: {"model": "m", "messages": _user(text), "max_tokens": 1},
    "/vertex_generate": lambda text: {
        "instances": [{"text": text}],
        "parameters": {"sampling_params": {"max_new_tokens": 1}},
    },
    "/api/chat": lambda text: {"model": "m", "messages": _user(text), "options": {"num_predict": 1}},
    "/api/generate": lambda text: {"model": "m", "prompt": text, "options": {"num_predict": 1}},
}
"""A body of each endpoint that generates."""
_NOT_STREAMED = ("/v1/score", "/v1/decisions")


@pytest.mark.parametrize("path", _ENDPOINTS)
def test_headers_keep_tenants_apart_and_opt_out_on_every_endpoint(client: Client, path: str) -> None:
    """Also where SGLang takes `custom_params` or `cache_salt` out of a body."""
    tenant, other = ({"x-pic-salt": f"{name}{path}"} for name in "ab")

    def spliced(beginning: str, headers: dict[str, str], *, stream: bool = False) -> float:
        before = client.counters()
        body = _streamed(path, _ENDPOINTS[path](beginning + _BODY), stream)
        status, _, said = _exchange(client, path, body, headers)
        assert status == 200
        wait_until(lambda: client.grown(before)["prompt_tokens"] > 0)
        num_spliced = client.grown(before)["tokens:chunk"]
        assert said["x-pic-spliced"] == str(int(num_spliced)), "streams too"
        return num_spliced

    assert spliced("It is noon. ", tenant) == 0
    assert spliced("It is one minute past noon. ", tenant) > 100
    assert spliced("Evening has come by now. ", tenant, stream=True) > 100
    assert spliced("It is late at night already. ", other) == 0
    assert spliced("A new day begins with the first light. ", tenant | {"x-pic-mode": "off"}) == 0
    for stream in (False, True):
        body = _streamed(path, _ENDPOINTS[path]("a"), stream)
        for headers in (
            {"x-pic-mode": "maybe"},
            {"x-pic-mod": "off"},
            {"x-pic-salt": "two words"},
            {"x-request-id-pic-slat": "a"},
        ):
            status, answer = _post(client, path, body, headers)
            assert (status, "header" in answer, "x-pic-" in answer) == (400, True, True)


def test_what_cannot_be_read_is_refused_before_a_stream_begins_and_in_a_short_line(client: Client) -> None:
    bad = [
        ({"sampling_params": {"custom_params": {"pic": {"seam_tokens": -1}}}}, {}, "seam_tokens=-1"),
        ({"extra_key": KEY_MARK + "a" * 2_000_000}, {}, "extra_key="),
        ({"cache_salt": "theirs"}, {"x-pic-salt": "mine"}, "x-pic-salt"),
        ({"sampling_params": {"custom_params": {"pic": {"mode": "auto"}}}}, {"x-pic-mode": "off"}, "x-pic-mode='off'"),
        ({"sampling_params": [{"max_new_tokens": 1}]}, {}, "must be an object"),
        ({"text": ["a"] * 2, "sampling_params": [{}, {"custom_params": {"pic": 1}}]}, {"x-pic-mode": "off"}, "pic=1"),
    ]
    salt, key = {"cache_salt": "theirs"}, {"extra_key": KEY_MARK + "a"}
    elsewhere = [(path, body) for path in ("/v1/responses", "/v1/completions", "/invocations") for body in (salt, key)]
    for stream in (False, True):
        for body, headers, named in bad:
            status, answer = _post(client, "/generate", {"text": "a", "stream": stream, **body}, headers)
            assert (status, named in answer, len(answer) < 400) == (400, True, True)
        for path, body in elsewhere:
            whole = {**_streamed(path, _ENDPOINTS[path]("a"), stream), **body}
            status, answer = _post(client, path, whole, {"x-pic-salt": "mine"})
            assert (status, "x-pic-salt" in answer or "extra_key=" in answer) == (400, True)


def test_an_empty_prompt_is_refused_and_the_server_lives(client: Client) -> None:
    """SGLang 0.5.23 itself ends with an error at one."""
    for stream in (False, True):
        for body in (
            {"text": ""},
            {"text": ["a", ""]},
            {"input_ids": []},
            {"input_ids": [[]]},
            {"input_ids": [[5], []]},
        ):
            status, answer = _post(client, "/generate", {**body, "stream": stream}, {})
            assert (status, "has no tokens" in answer) == (400, True)
        vertex = {"instances": [{"text": "a"}, {"text": ""}], "parameters": {"stream": stream}}
        assert _post(client, "/vertex_generate", vertex, {})[0] == 400
        assert _post(client, "/v1/completions", {"model": "m", "prompt": "", "stream": stream}, {})[0] == 400
    for query, item in (("", ""), ([], [])):
        body = {"model": "m", "query": query, "items": [item], "label_token_ids": [5]}
        assert _post(client, "/v1/score", body, {})[0] == 400
    assert client.generate(random_tokens(160, 40)).prompt_tokens == 40


def test_a_refused_switch_of_a_running_server_says_what_is_allowed(client: Client) -> None:
    for asked in ({"pic_mod": 0}, {SWITCH_KEY: 2}):
        status, answer = _post(client, "/set_internal_state", {"server_args": asked}, {})
        assert (status, "pic_mode: 0 (off) or 1 (auto)" in answer) == (400, True)
    assert client.internal_state()["modes"]["is_on"]


def test_server_info_has_the_configuration_and_how_full_the_index_is(client: Client) -> None:
    client.generate(random_tokens(150, 300))
    wait_until(lambda: client.internal_state()["index"]["tokens"] > 200)
    entry = client.internal_state()
    assert entry["config"]["cost_gate"] == "off", "as this server was configured"
    assert (entry["config"]["core"]["max_index_bytes"], entry["version"]) == (entry["index"]["max_bytes"], __version__)


def test_a_running_server_is_switched_off_and_on(client: Client) -> None:
    donor, later = random_tokens(140, 300), random_tokens(144, 300)
    client.generate(donor)
    spliced = [*random_tokens(141, 40), *donor]
    assert client.generate(spliced).chunk_hit_tokens > 200
    try:
        before = client.counters()
        assert client.post("/set_internal_state", {"server_args": {SWITCH_KEY: 0}}) == [True]
        for prompt in ([*random_tokens(142, 40), *donor], spliced, later):
            assert client.generate(prompt).cached_tokens == 0, "neither runs nor a prefix of spliced rows"
        assert client.generate(spliced).cached_tokens == len(spliced) - 1, "its own rows are exact"
        assert client.grown(before)["fallbacks:switched"] == 4
        assert client.counters()["mode_off"] == 1
        assert not client.internal_state()["modes"]["is_on"]
    finally:
        assert client.post("/set_internal_state", {"server_args": {SWITCH_KEY: 1}}) == [True]
    assert client.generate([*random_tokens(143, 40), *donor]).chunk_hit_tokens > 200
    assert client.generate([*random_tokens(145, 40), *later]).cached_tokens == 0, "what came while it was off"
    assert client.counters()["mode_off"] == 0


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _streamed(path: str, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The body with `stream`, where the endpoint has it."""
    if path == "/vertex_generate":
        return {**body, "parameters": {**body["parameters"], "stream": stream}}
    return body if path in _NOT_STREAMED else {**body, "stream": stream}


def _post(client: Client, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
    """Status and text of the answer."""
    return _exchange(client, path, body, headers)[:2]


def _exchange(
    client: Client, path: str, body: dict[str, Any], headers: dict[str, str]
) -> tuple[int, str, Mapping[str, str]]:
    """Status, text and headers of the answer; a body names the server's model where SGLang wants that."""
    asked = {"Content-Type": "application/json", **headers}
    if path == "/v1/responses":
        body = {"model": json.loads(client.server.get("/v1/models"))["data"][0]["id"], **body}
    sent = urllib.request.Request(client.server.base_url + path, json.dumps(body).encode(), asked)
    try:
        with urllib.request.urlopen(sent, timeout=300) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def _chat(text: str, **body: Any) -> dict[str, Any]:
    common = {"max_tokens": 2, "temperature": 0, "return_cached_tokens_details": True}
    return {"model": "m", "messages": _user(text), **common, **body}


def _stream(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with request(client.server.base_url + "/v1/chat/completions", body, timeout_s=300) as answer:
        return [json.loads(event) for event in read_events(answer) if event != b"[DONE]"]
