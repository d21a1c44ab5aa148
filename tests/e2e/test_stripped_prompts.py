"""With `strip` a server answers prompts with a known nonce as those without it, and one is a hit of the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sglang_pic.nonces import NONCES
from tests.e2e.servers import on_servers
from tests.e2e.serving import Client

pytestmark = [pytest.mark.e2e, on_servers("text")]

NAME = "claude-code-billing"
RULES = " ".join(f"Rule {n}: the file {n * 7 % 31} is read before the file {n * 13 % 17}." for n in range(25))
ASKED = {"role": "user", "content": "Which file is read first?"}


def header(n: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{n}.0a{n}; cc_entrypoint=cli; cch={n:05x};"


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _joined(parts: list[str]) -> str:
    return "\n".join(parts)


ENDPOINTS: dict[str, tuple[str, Callable[[list[str]], dict[str, Any]]]] = {
    "messages": ("/v1/messages", lambda parts: {"system": _parts(*parts), "messages": [ASKED], "max_tokens": 8}),
    "chat": (
        "/v1/chat/completions",
        lambda parts: {"messages": [{"role": "system", "content": _joined(parts)}, ASKED], "max_tokens": 8},
    ),
    "chat in parts": (
        "/v1/chat/completions",
        lambda parts: {"messages": [{"role": "system", "content": _parts(*parts)}, ASKED], "max_tokens": 8},
    ),
    "responses": (
        "/v1/responses",
        lambda parts: {"instructions": _joined(parts), "input": "Which?", "max_output_tokens": 8, "store": False},
    ),
    "completions": ("/v1/completions", lambda parts: {"prompt": _joined(parts), "max_tokens": 8}),
    "generate": (
        "/generate",
        lambda parts: {"text": _joined(parts), "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
    ),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_what_is_answered_is_the_prompt_without_the_header(client: Client, name: str) -> None:
    path, body = ENDPOINTS[name]
    model = json.loads(client.server.get("/v1/models"))["data"][0]["id"]

    def asked(*parts: str) -> tuple[str, int, int]:
        """The answer, the prompt's tokens and the hits among them."""
        answer = client.post(path, {"model": model, "temperature": 0, **body([*parts])})
        if path == "/generate":
            meta = answer["meta_info"]
            return answer["text"], meta["prompt_tokens"], meta["cached_tokens"]
        usage = answer["usage"]
        if path == "/v1/messages":
            hits = usage.get("cache_read_input_tokens", 0)
            return answer["content"][0]["text"], usage["input_tokens"] + hits, hits
        total, details = usage.get("prompt_tokens") or usage["input_tokens"], "prompt_tokens_details"
        found = usage.get(details) or usage["input_tokens_details"]
        text = answer["choices"][0] if "choices" in answer else answer["output"][0]["content"][0]
        return str(text.get("text") or text["message"]["content"]), total, found["cached_tokens"]

    before = client.counters()
    parts = f"You answer the questions of {name}.", RULES
    assert asked(header(0), *parts)[2] < 64
    # A hit and a full prefill round differently, so the prompt without it is a hit, too.
    text, total, hits = asked(*parts)
    assert hits == total - 1
    for n in (1, 2):
        assert asked(header(n), *parts) == (text, total, hits)
    assert client.grown(before)[f"stripped:{NAME}"] == 3
    if path == "/v1/messages":
        asked_for = {key: value for key, value in body([header(3), *parts]).items() if key != "max_tokens"}
        assert client.post(f"{path}/count_tokens", {"model": model, **asked_for})["input_tokens"] == total


def test_a_nonce_of_a_user_stays(client: Client) -> None:
    """Of a chat the system prompt alone is looked at, and only its beginning for the header."""
    before = client.counters()
    for system in ("You help.", "You help. " + RULES + header(1)):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": header(2)}]
        client.post("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 1})
    assert all(client.grown(before)[f"stripped:{name}"] == 0 for name in NONCES)
