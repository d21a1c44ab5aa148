"""What servers tell and what a router makes of it: messages, the thread that sends them, and the sidecar itself.

Servers, and the gateway that pins routing keys, are stand-ins; `make fleet` has the real ones.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sglang_pic.core import Chunker, ContentIndex, CoreConfig, as_tokens
from sglang_pic.errors import ConfigError
from sglang_pic.route import wire
from sglang_pic.route.fleet import ASSUMED_S, SILENT_S, Fleet
from sglang_pic.route.listeners import Listeners
from sglang_pic.route.prompts import Prompts
from sglang_pic.route.proxy import KEY_HEADER, WORKER_HEADER, Router
from sglang_pic.route.publisher import Publisher, all_donors
from sglang_pic.route.sketch import cut, salted
from sglang_pic.route.wire import HEARTBEAT_S, MAX_NAMES, Cutting, Told, encode, pack
from tests.e2e.listener import Listener

SALT = b"a secret of servers and routers"
CUTTING = Cutting.of(CoreConfig(), {7})
PLAIN = wire.namespace_bytes(None, None)
GATEWAY = "http://gateway"


def text(seed: int, length: int = 2000) -> np.ndarray:
    return as_tokens(np.random.default_rng(seed).integers(100, 30_000, length))


def told(number: int, *, run: int = 1, begins: Cutting | None = None, held: Any = (), gone: Any = ()) -> bytes:
    return encode(Told(run=run, number=number, begins=begins, held=pack(held), gone=pack(gone)))


# What servers tell.


def test_a_publisher_tells_what_an_index_can_splice() -> None:
    """Donors of equal chunks count once, a late listener learns everything, and no namespace but one is told."""
    publisher = Publisher("tcp://127.0.0.1:*", SALT, CUTTING, lambda name: PLAIN if name == "plain" else None)
    changes: list[Any] = []
    index = ContentIndex(CoreConfig(max_index_tokens=3500), watch=lambda *change: changes.append(change))

    def publish(*texts: np.ndarray, namespace: str = "plain") -> None:
        for tokens in texts:
            index.publish(namespace, tokens, [(0, len(tokens))])
        publisher.put(changes[:])
        changes.clear()

    listener = Listener(publisher.endpoint, SALT)
    try:
        publish(text(1), text(1), np.concatenate([text(9, 50), text(1)]), text(2, 1000), namespace="plain")
        publish(text(3, 500), namespace="other")
        listener.wait_for(_names(index))
        # The oldest path leaves the index, and donors with it.
        publish(text(4))
        listener.wait_for(_names(index))
        index.flush()
        publisher.put([], is_all=True)
        listener.wait_for(set())
        publish(text(5))
        listener.wait_for(_names(index))
        assert listener.names
        assert listener.cutting == CUTTING
        # Whoever is lost asks anew.
        listener.ask_anew()
        listener.wait_for(_names(index), num_begun=2)
    finally:
        publisher.stop()
        listener.close()


def _names(index: ContentIndex) -> set[int]:
    return set(salted(index.donor_names().get("plain", []), PLAIN, SALT).tolist())


def test_a_scheduler_never_waits_and_what_is_lost_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "_work", lambda self: self._stopped.wait())
    publisher = Publisher("tcp://127.0.0.1:*", SALT, CUTTING, lambda _: PLAIN)
    try:
        for number in range(1000):
            publisher.put([("plain", number, 1)])
        assert publisher.is_behind
        assert publisher.report().num_overflows == 1
        publisher._take_changes()
        publisher.put([("plain", 5000, 1)])
        publisher._take_changes()
        assert publisher.is_behind, "changes alone do not tell what was lost"
        publisher.put(all_donors({"plain": [4, 8, 8]}), is_all=True)
        publisher._take_changes()
        assert not publisher.is_behind
        assert publisher._names.donors == Counter(salted([4, 8, 8], PLAIN, SALT).tolist())
    finally:
        publisher.stop()
        publisher._listeners.close()


def test_whoever_reaches_the_port_costs_next_to_nothing() -> None:
    """Bytes without end, half proofs, connections without end: messages go on, memory stays, the secret is wanted."""
    publisher = Publisher("tcp://127.0.0.1:*", SALT, CUTTING, lambda _: PLAIN)
    listener, stranger = Listener(publisher.endpoint, SALT), Listener(publisher.endpoint, SALT[:-1])
    resident = psutil.Process().memory_info
    peers: list[socket.socket] = []
    try:
        publisher.put([("plain", name, 1) for name in range(64)])
        listener.wait_until(lambda: bool(listener.names), 30.0)
        before, until = resident().rss, time.monotonic() + 5
        listener.times.clear()
        while time.monotonic() < until:
            peers.append(socket.create_connection(wire.address(publisher.endpoint)))
            with suppress(OSError):
                peers[-1].sendall(bytes(1 << len(peers) % 20))
            for peer in peers[:-100]:
                peer.close()
            del peers[:-100]
            time.sleep(0.001)
        listener.wait_until(lambda: listener.times[-1] > until, 30.0)
        assert resident().rss - before < 5 << 20
        assert max(np.diff(listener.times)) < HEARTBEAT_S + 1
        assert listener.num_begun == 1, "nobody else was let in"
        assert stranger.num_begun == 0
    finally:
        publisher.stop()
        for each in (listener, stranger):
            each.close()
        for peer in peers:
            peer.close()


def test_a_listener_that_does_not_keep_up_is_disconnected() -> None:
    listeners = Listeners("tcp://127.0.0.1:*", SALT)
    try:
        with socket.create_connection(wire.address(listeners.endpoint)) as peer:
            until = time.monotonic() + 30
            listeners.step()
            peer.sendall(wire.prove(peer.recv(wire.NONCE_BYTES), SALT))
            while not listeners.wants_all and time.monotonic() < until:
                listeners.step()
            assert listeners.wants_all
            listeners.send(b"before", begins=False)
            assert listeners.wants_all, "it is told from a beginning on"
            listeners.send(b"all", begins=True)
            assert peer.recv(100) == wire.framed(b"all")
            for _ in range(64):
                listeners.send(bytes(1 << 18), begins=False)
            assert not listeners._proved
    finally:
        listeners.close()


def test_an_index_asks_for_its_oldest_path_and_forgets_what_is_gone() -> None:
    index = ContentIndex()
    for seed in (1, 2):
        index.publish("n", text(seed, 300), [(0, 300)])
    assert index.recheck_oldest(lambda _, tokens: len(tokens) if np.array_equal(tokens, text(2, 300)) else 100)
    assert index.num_tokens == 400
    for _ in range(2):
        assert not index.recheck_oldest(lambda _, tokens: len(tokens))
    assert index.num_tokens == 400


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), ("short", "5 bytes"), ("l" * 65, "65 bytes")])
def test_a_secret_that_is_not_allowed(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "salt"
    if content is not None:
        path.write_text(content + "\n")
    with pytest.raises(ConfigError, match=said):
        wire.read_salt(str(path))


# What a router makes of it.


def test_messages_that_are_lost_late_or_of_another_kind_cost_what_a_server_told() -> None:
    fleet = Fleet(["a", "b"])
    index = fleet.balancer.index
    assert not fleet.take("a", told(5, held=[1]), 0.0), "it has to begin"
    assert fleet.take("a", told(6, begins=CUTTING, held=[1, 2]), 1.0)
    assert fleet.take("a", told(7, held=[3], gone=[1]), 1.0)
    assert (fleet.balancer.servers, index.num_names("a"), fleet.cutting) == (["a"], 2, CUTTING)
    assert not fleet.take("a", told(9, held=[4]), 1.0)
    assert index.num_names("a") == 2, "a gap costs nothing until it is mended"
    assert not fleet.take("a", told(0, run=2), 1.0)
    assert index.num_names("a") == 0, "a server that began anew holds nothing of before"
    assert fleet.take("a", told(1, run=2, begins=CUTTING, held=[8]), 1.0)
    nonsense = msgspec.structs.replace(CUTTING, chunk_avg_tokens=17)
    for other in (Cutting.of(CoreConfig(chunk_avg_tokens=32, chunk_max_tokens=128), {7}), nonsense):
        assert fleet.take("b", told(0, begins=other, held=[8]), 1.0)
        assert "cuts text otherwise" in fleet.status()["b"].error
    for junk in (b"", b"\xff" * 9, msgspec.msgpack.encode({"version": 2}), told(2, run=2)[:-3]):
        assert fleet.take("b", junk, 1.0)
        assert "not a message" in fleet.status()["b"].error
    assert fleet.take("b", encode(Told(run=1, number=0, begins=CUTTING, held=bytes(8 * MAX_NAMES + 8))), 1.0)
    assert fleet.balancer.servers == ["a"]
    fleet.leave_silent(1.0 + SILENT_S)
    assert fleet.balancer.servers == ["a"]
    fleet.leave_silent(1.1 + SILENT_S)
    assert (fleet.balancer.servers, len(index), fleet.cutting) == ([], 0, None)
    assert not fleet.take("a", told(2, run=2), 9.0), "after a silence it has to begin again"
    assert fleet.take("b", told(0, begins=nonsense), 9.0)
    assert fleet.balancer.servers == []


def test_text_that_was_sent_counts_until_its_server_tells_or_does_not() -> None:
    fleet = Fleet(["a", "b"])
    index = fleet.balancer.index
    fleet.assume("a", np.array([1], np.uint64), 0.0)
    assert len(index) == 0, "it is not there"
    fleet.take("a", told(0, begins=CUTTING, held=[1]), 0.0)
    fleet.assume("a", np.array([1, 2, 3, 4], np.uint64), 1.0)
    fleet.assume("a", np.array([4, 5], np.uint64), 2.0)
    fleet.take("a", told(1, held=[3], gone=[4]), 3.0)
    assert index.num_names("a") == 4
    for at, left in ((1.0 + ASSUMED_S, 4), (1.1 + ASSUMED_S, 3), (2.1 + ASSUMED_S, 2)):
        fleet.take("a", told(fleet._heard["a"].next_number), at)
        fleet.expire(at)
        assert index.num_names("a") == left
    assert index.missing("a", np.array([1, 2, 3, 4, 5], np.uint64)).tolist() == [2, 4, 5]


@pytest.mark.parametrize(
    ("body", "namespace"),
    [
        ({"input_ids": "IDS"}, (None, None)),
        ({"prompt": "IDS", "extra_key": "", "cache_salt": "s"}, (None, "s")),
        ({"input_ids": "IDS", "extra_key": "k", "custom_params": {"pic": {"pin": "x", "mode": "auto"}}}, ("k", None)),
        ({"input_ids": "IDS", "sampling_params": {"custom_params": {"pic": {"mode": "off"}}}}, "no"),
        ({"input_ids": "IDS", "custom_params": {"pic": {"preset": "most"}}}, "no"),
        ({"input_ids": "IDS", "lora_path": "adapter"}, "no"),
        ({"prompt": "IDS", "model": "base:adapter"}, "no"),
        ({"input_ids": [[1], [2]]}, "no"),
        ({"input_ids": []}, "no"),
        ({"input_ids": [1 << 40]}, "no"),
        ({"messages": [{"role": "user", "content": "no tokenizer"}]}, "no"),
        ({}, "no"),
        ([], "no"),
    ],
)
def test_prompts_are_cut_as_servers_cut_them(body: Any, namespace: Any) -> None:
    data = json.dumps(body).replace('"IDS"', json.dumps(text(1).tolist())).encode()
    sketched = Prompts(None, SALT).sketch(data, CUTTING)
    if namespace == "no":
        assert sketched is None
    else:
        wanted = cut(text(1), wire.namespace_bytes(*namespace), SALT, chunker=Chunker(CoreConfig()))
        assert sketched.names.tolist() == wanted.names.tolist()


def test_the_tokenizer_of_the_servers_reads_texts_and_messages(model_dir: Callable[[str], Path]) -> None:
    folder = model_dir("tiny-gqa")
    prompts = Prompts(str(folder), SALT)
    said = "The quick brown fox jumps over the lazy dog. " * 60
    bodies = [{"text": said}, {"prompt": said}, {"messages": [{"role": "user", "content": said}]}]
    sketches = [prompts.sketch(json.dumps(body).encode(), CUTTING) for body in bodies]
    lengths = [0 if sketched is None else sketched.num_tokens for sketched in sketches]
    assert 500 < lengths[0] == lengths[1] < lengths[2]


# The sidecar.


class StandIn:
    """A gateway that pins routing keys, in front of servers by name; `dead` ones answer nothing."""

    def __init__(self) -> None:
        self.servers = {"http://a": 0, "http://b": 0, "http://c": 0}
        self.dead: set[str] = set()
        self.fails_keys = False
        self.names_workers = True
        self.pins: dict[str, str] = {}
        self.seen: list[tuple[str, str | None]] = []

    async def answer(self, request: Request) -> Response:
        if request.url.path == "/v1/models":
            return Response(b"models", headers={"x-kept": "yes"})
        key, body = request.headers.get(KEY_HEADER), await request.json()
        if self.fails_keys and key is not None:
            return Response(b"no such worker", 503)
        alive = [server for server in self.servers if server not in self.dead]
        if key is not None and self.pins.get(key) not in alive:
            self.pins[key] = alive[len(self.pins) % len(alive)]
        server = alive[0] if key is None else self.pins[key]
        self.seen.append((server, key))
        usage = {"prompt_tokens": len(body.get("input_ids", [])), "cached_tokens": 0}
        events = [b"data: first\n\n", b"data: " + json.dumps(usage).encode() + b"\n\n"]
        headers = {WORKER_HEADER: server} if self.names_workers else {}
        return StreamingResponse(_each(events), headers=headers, media_type="text/event-stream")


async def _each(parts: list[bytes]) -> Any:
    for part in parts:
        yield part


@pytest.fixture
def gateway() -> StandIn:
    return StandIn()


@pytest.fixture
def sidecar(gateway: StandIn) -> Iterator[Router]:
    app = Starlette(routes=[Route("/{path:path}", gateway.answer, methods=["GET", "POST"])])
    router = Router(GATEWAY, dict.fromkeys(gateway.servers, "tcp://127.0.0.1:9"), Prompts(None, SALT))
    router._client = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    for server in gateway.servers:
        router.fleet.take(server, told(0, begins=CUTTING), time.monotonic())
    yield router
    router._sketching.shutdown()


def ask(router: Router, *bodies: Any, path: str = "/generate", headers: dict[str, str] | None = None) -> list[Any]:
    """Requests one after the other; their answers."""

    async def send() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router.app()), base_url="http://router") as client:
            return [await client.post(path, content=json.dumps(body).encode(), headers=headers) for body in bodies]

    return asyncio.run(send())


def prompt(seed: int) -> dict[str, Any]:
    return {"input_ids": text(seed).tolist()}


def hold(router: Router, server: str, *seeds: int) -> None:
    names = [name for seed in seeds for name in cut(text(seed), PLAIN, SALT).names.tolist()]
    router.fleet.balancer.index.add(server, names)


def test_requests_go_where_their_text_is(gateway: StandIn, sidecar: Router) -> None:
    """Keys are learned from answers; from then on each request reaches the server that was chosen."""
    seeds = {"http://a": 1, "http://b": 2, "http://c": 3}
    for server, seed in seeds.items():
        hold(sidecar, server, seed)
    ask(sidecar, *[prompt(seed) for _ in range(4) for seed in seeds.values()])
    gateway.seen.clear()
    answers = ask(sidecar, *[prompt(seed) for seed in seeds.values()])
    assert [server for server, _ in gateway.seen] == list(seeds)
    assert answers[0].text.startswith("data: first\n\ndata: {")
    assert answers[0].headers["content-type"].startswith("text/event-stream")
    assert all(sidecar.fleet.balancer.outstanding(server) == 0 for server in seeds)
    assert sidecar._counts["elsewhere"] + len(seeds) < sidecar._counts["steered"] == 5 * len(seeds)
    (said,) = ask(sidecar, prompt(2), path="/route?path=/generate")
    assert said.json()["server"] == "http://b"
    assert gateway.pins[said.json()["headers"][KEY_HEADER]] == "http://b"


@pytest.mark.parametrize("trouble", ["fails_keys", "sketch", "nobody_told", "own_key", "unreadable", "not_named"])
def test_no_request_is_lost(trouble: str, gateway: StandIn, sidecar: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong, the gateway gets the request without our header, or with the client's own."""
    headers = {KEY_HEADER: "mine"} if trouble == "own_key" else None
    body = {"input_ids": "?"} if trouble == "unreadable" else prompt(1)
    gateway.fails_keys, gateway.names_workers = trouble == "fails_keys", trouble != "not_named"
    if trouble == "sketch":
        monkeypatch.setattr(sidecar._prompts, "sketch", lambda *_: 1 / 0)
    if trouble == "nobody_told":
        sidecar.fleet.leave_silent(time.monotonic() + 60)
    (answer,) = ask(sidecar, body, headers=headers)
    assert answer.status_code == 200
    ((_, key),) = gateway.seen
    assert key == "mine" if trouble == "own_key" else (key is None) is (trouble != "not_named")
    assert all(sidecar.fleet.balancer.outstanding(server) == 0 for server in sidecar.fleet.balancer.servers)


def test_what_servers_tell_says_where_a_gateway_sent_a_key(gateway: StandIn, sidecar: Router) -> None:
    """`sglang-router` does not say which server answers."""
    gateway.names_workers = False
    fleet, number = sidecar.fleet, Counter[str]()
    for seed in range(12):
        ask(sidecar, prompt(seed))
        server, _ = gateway.seen[-1]
        number[server] += 1
        names = cut(text(seed), PLAIN, SALT).names.tolist()
        fleet.take(server, told(number[server], held=names), time.monotonic())
    assert all(gateway.pins[sidecar._keys.get("/generate", server) or ""] == server for server in gateway.servers)
    sidecar._keys.expect("/generate", "one", [1, 2])
    sidecar._keys.expect("/generate", "two", [2, 3])
    sidecar._keys.told("http://a", [2])
    assert sidecar._keys.get("/generate", "http://a") not in ("one", "two"), "it may be either"
    sidecar._keys.told("http://a", [3])
    assert sidecar._keys.get("/generate", "http://a") == "two"


def test_a_server_that_dies_gives_its_key_to_the_one_that_answers(gateway: StandIn, sidecar: Router) -> None:
    hold(sidecar, "http://a", 1)
    ask(sidecar, *[prompt(1)] * 3)
    key = sidecar._keys.get("/generate", "http://a")
    gateway.dead = {"http://a"}
    (answer,) = ask(sidecar, prompt(1))
    assert answer.status_code == 200
    assert sidecar._keys.get("/generate", "http://a") is None
    assert gateway.pins[key] == gateway.seen[-1][0] != "http://a"


def test_a_gateway_that_is_gone_is_told_and_others_pass_through(gateway: StandIn, sidecar: Router) -> None:
    async def send(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(sidecar.app()), base_url="http://router") as client:
            return await client.get(path)

    models = asyncio.run(send("/v1/models"))
    assert (models.text, models.headers["x-kept"], models.headers["content-length"]) == ("models", "yes", "6")
    status = asyncio.run(send("/status")).json()
    assert {each["is_there"] for each in status["servers"].values()} == {True}

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    sidecar._client = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
    (answer,) = ask(sidecar, prompt(1))
    assert (answer.status_code, "gateway" in answer.text) == (502, True)


def test_a_client_that_leaves_takes_its_request_along(sidecar: Router) -> None:
    """So the server aborts it, as it does without the router; its tokens wait no more."""
    ended: list[str] = []

    async def never(_: httpx.Request) -> httpx.Response:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("aborted")
        raise AssertionError

    sidecar._client = httpx.AsyncClient(transport=httpx.MockTransport(never))
    messages = [{"type": "http.request", "body": json.dumps(prompt(1)).encode()}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if len(messages) > 1 else messages[0]

    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}
    response = asyncio.run(sidecar._steer(Request(scope, receive)))
    assert (response.status_code, ended) == (499, ["aborted"])
    assert sidecar._counts["steered"] == 1
    assert all(sidecar.fleet.balancer.outstanding(server) == 0 for server in sidecar.fleet.balancer.servers)
