"""`check` against a small server with a cache of its own: honest with noise, or with rows of other prompts."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from pic_bench.check.judging import Pair, _wrong

from sglang_pic.cli import main
from tests.helpers.replay_server import Handler, QuietServer

WORDS = [f"w{number}" for number in range(40)]


@dataclass
class CachingServer:
    """Caches whole words of prompts; its answer depends on the prompt, and on what is wrong with the cache."""

    obeys_salt: bool = True
    tells_cached: bool = True
    has_logprobs: bool = True
    noise: float = 0.0
    """Standard deviation of logits, at each request anew."""
    is_wrong: bool = False
    """Whether rows from the cache are of another text."""
    is_wrong_whole: bool = True
    """Also where all but the last token is cached."""
    caches: bool = True
    seen: dict[str, list[list[str]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    context_len: int = 10**6
    sglang: bool = False

    def logits(self, seed: str) -> list[float]:
        rng, own = random.Random(seed), random.Random()
        return [rng.gauss(0, 2) + own.gauss(0, self.noise) for _ in WORDS]

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = json.dumps(body["messages"]).split()
        with self.lock:
            known = self.seen.setdefault(body.get("cache_salt", "") if self.obeys_salt else "", [])
            cached = max((common(prompt, other) for other in known), default=0) if self.caches else 0
            cached = min(cached, len(prompt) - 1)
            known.append(prompt)
        is_wrong = self.is_wrong and cached > 5 and (self.is_wrong_whole or cached < len(prompt) - 1)
        rows = " ".join(prompt) + (str(cached) if is_wrong else "")
        tokens, content = list[str](), list[dict[str, Any]]()
        for _ in range(body["max_tokens"]):
            logits = self.logits(" ".join([rows, *tokens]))
            total = math.log(sum(map(math.exp, logits)))
            ranked = sorted(((logit - total, word) for logit, word in zip(logits, WORDS, strict=True)), reverse=True)
            top = [{"token": word, "logprob": value} for value, word in ranked[: body.get("top_logprobs", 0)]]
            tokens.append(ranked[0][1])
            content.append({"token": tokens[-1], "logprob": ranked[0][0], "top_logprobs": top})
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        if self.tells_cached and (cached or not self.caches):
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        logprobs = {"content": content} if self.has_logprobs else None
        return {"choices": [{"message": {"content": " ".join(tokens)}, "logprobs": logprobs}], "usage": usage}


class CachingHandler(Handler):
    """The HTTP side of `CachingServer`."""

    fake: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            return self.reply(404, {"detail": "Not Found"})
        if body.get("logprobs") and (not self.fake.has_logprobs or body["top_logprobs"] > 5):
            return self.reply(400, {"error": {"message": "too many logprobs"}})
        self.reply(200, self.fake.answer(body))


def common(one: list[str], other: list[str]) -> int:
    """How many words are equal at the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Iterator[Check]:
    """The exit code and the JSON of `check` on a server with these properties."""
    running: list[ThreadingHTTPServer] = []

    def run(*words: str, **properties: Any) -> tuple[int, dict[str, Any]]:
        server = QuietServer(("127.0.0.1", 0), type("Bound", (CachingHandler,), {"fake": CachingServer(**properties)}))
        running.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        code = main(["check", url, "sample:agents", "--limit-calls", "14", "--json", *words])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else {"error": said.err}

    yield run
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("obeys_salt", [True, False])
@pytest.mark.parametrize("has_logprobs", [True, False])
@pytest.mark.parametrize("tells_cached", [True, False])
def test_a_wrong_cache_is_found_and_noise_is_not(
    check: Check, obeys_salt: bool, has_logprobs: bool, tells_cached: bool
) -> None:
    properties = {"obeys_salt": obeys_salt, "has_logprobs": has_logprobs, "tells_cached": tells_cached}
    # Without logprobs one token in a hundred that flips changes every fourth answer: too much to tell by 14 prompts.
    noise = 0.02 if has_logprobs else 0.001
    code, found = check(noise=noise, **properties)
    assert (code, found["wrong"]) == (0, [])
    code, found = check(noise=noise, is_wrong=True, **properties)
    assert code == 1
    # By chance a list of five tokens shows little of what changed.
    assert len(found["wrong"]) > 0.8 * (len(found["again"]) + len(found["grown"]))
    assert len(found["noise"]) == len(found["again"]) == 14
    assert found["num_top"] == (5 if properties["has_logprobs"] else 0)
    knows_cold = properties["obeys_salt"] and properties["tells_cached"]
    assert len(found["grown"]) == (12 if knows_cold else 0), "a call of each session but the first"
    told = [pair["cached_tokens"] for pair in found["again"]]
    assert all(told) if properties["tells_cached"] else told == [None] * 14


def test_a_cache_that_is_wrong_for_parts_of_prompts_alone_is_found(check: Check) -> None:
    """A server without noise answers a whole prompt again exactly."""
    code, found = check(is_wrong=True, is_wrong_whole=False)
    assert code == 1
    assert {pair["kl"] for pair in found["again"]} == {0}
    assert len(found["wrong"]) > 0.8 * len(found["grown"])


def test_a_noisy_server_needs_more_to_be_called_wrong(check: Check) -> None:
    assert check(noise=0.6)[0] == 0


def test_noise_without_logprobs_is_called_wrong_as_seldom_as_is_said() -> None:
    """Calls that are sent from the cache twice must not count their noise twice."""
    rng, called_wrong = random.Random(0), 0

    def pairs(differ: list[bool]) -> list[Pair]:
        fields = {"session_id": "s", "kl": None, "at": None, "prompt_tokens": 9, "cached_tokens": 8}
        return [Pair(call=call, is_same=not each, **fields) for call, each in enumerate(differ)]

    for _ in range(200):
        cold, *others = ([rng.random() < 0.3 for _ in range(100)] for _ in range(4))
        noise, again, grown = (pairs([a != b for a, b in zip(cold, each, strict=True)]) for each in others)
        called_wrong += bool(_wrong(noise, [again, grown], None))
    assert called_wrong <= 6


def test_a_server_that_caches_nothing_is_not_checked(check: Check) -> None:
    code, found = check(caches=False)
    assert code == 1
    assert "reports 0 cached tokens" in found["error"]
