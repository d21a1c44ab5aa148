"""What servers tell and what a router makes of it: messages, the thread that sends them, and the sidecar itself.

Servers are stand-ins, HAProxy is real.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from aiohttp import web
from pic_bench.compare.server import free_port

from sglang_pic.cli import main
from sglang_pic.core import Chunker, ContentIndex, CoreConfig, as_tokens
from sglang_pic.errors import ConfigError
from sglang_pic.route import wire
from sglang_pic.route.fleet import ASSUMED_S, MAX_DELIMITERS, SILENT_S, Fleet
from sglang_pic.route.listeners import Listeners
from sglang_pic.route.publisher import Publisher, all_donors
from sglang_pic.route.request_body import Prompts
from sglang_pic.route.sidecar import DEADLINE_S, MAX_BODY_BYTES, Sidecar
from sglang_pic.route.sketch import cut, salted
from sglang_pic.route.wire import HEARTBEAT_S, MAX_NAMES, Cutting, Update, encode, pack
from sglang_pic.route.workers import Workers
from tests.e2e.listener import Listener

SALT = b"a secret of servers and routers"
CUTTING = Cutting.of(CoreConfig(), {7})
PLAIN = wire.namespace_bytes(None, None)


def text(seed: int, length: int = 2000) -> np.ndarray:
    return as_tokens(np.random.default_rng(seed).integers(100, 30_000, length))


def told(number: int, *, run: int = 1, begins: Cutting | None = None, held: Any = (), gone: Any = ()) -> bytes:
    return encode(Update(run=run, number=number, begins=begins, held=pack(held), gone=pack(gone)))


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
        assert "cuts text" in fleet.status(1.0)["b"].error
    for junk in (b"", b"\xff" * 9, msgspec.msgpack.encode({"version": 2}), told(2, run=2)[:-3]):
        assert fleet.take("b", junk, 1.0)
        assert "not a message" in fleet.status(1.0)["b"].error
    assert fleet.take("b", encode(Update(run=1, number=0, begins=CUTTING, held=bytes(8 * MAX_NAMES + 8))), 1.0)
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
    assert index.add("a", [1, 2, 3, 4, 5]) == [2, 4, 5]


def test_servers_that_cut_as_most_do_get_prompts_whoever_speaks_first() -> None:
    fleet = Fleet(["liar", "a", "b"])
    other = Cutting.of(CoreConfig(chunk_avg_tokens=32, chunk_max_tokens=128), {7})
    fleet.take("liar", told(0, begins=other, held=[1]), 0.0)
    assert fleet.balancer.servers == ["liar"]
    for server in ("a", "b"):
        fleet.take(server, told(0, begins=CUTTING, held=[2]), 1.0)
    assert (fleet.balancer.servers, fleet.cutting) == (["a", "b"], CUTTING)
    assert "otherwise than most" in fleet.status(1.0)["liar"].error
    many = msgspec.structs.replace(CUTTING, delimiters=list(range(MAX_DELIMITERS + 1)))
    fleet.take("liar", told(1, begins=many), 1.0)
    assert "does not support" in fleet.status(1.0)["liar"].error
    fleet.take("liar", told(2, begins=CUTTING), 1.0)
    assert (fleet.balancer.servers, fleet.status(1.0)["liar"].error) == (["a", "b", "liar"], "")


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


# The sidecar, and HAProxy in front of servers.


class _Slow:
    """Sketches that never come."""

    async def sketch(self, data: bytes, cutting: Cutting, salt: str | None = None) -> None:
        await asyncio.sleep(60)

    def stop(self) -> None:
        """Nothing runs."""


@contextmanager
def running(sidecar: Sidecar) -> Iterator[str]:
    """The sidecar's address; it knows servers that told nothing but how they cut."""
    loop, port = asyncio.new_event_loop(), free_port()
    runner = web.AppRunner(sidecar.app())

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        for server in sidecar.fleet.status(0.0):
            sidecar.fleet.take(server, told(0, begins=CUTTING), time.monotonic())

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def ask(address: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request("GET" if body is None else "POST", path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def prompt(seed: int) -> bytes:
    return json.dumps({"input_ids": text(seed).tolist()}).encode()


def hold(sidecar: Sidecar, server: str, *seeds: int) -> None:
    for seed in seeds:
        sidecar.fleet.balancer.index.add(server, cut(text(seed), PLAIN, SALT).names.tolist())


def sidecar_of(servers: Iterable[str]) -> Sidecar:
    return Sidecar(dict.fromkeys(servers, "tcp://127.0.0.1:9"), SALT, Workers(None, SALT))


def test_the_sidecar_names_the_server_with_the_text() -> None:
    sidecar = sidecar_of(["http://a", "http://b"])
    with running(sidecar) as address:
        hold(sidecar, "http://b", 2)
        while sidecar._counts["named"] < 1:  # its processes start
            ask(address, "/route", prompt(7))
        said = json.loads(ask(address, "/route?path=/generate", prompt(2))[1])
        assert said["server"] == "http://b"
        assert 0 < said["computed_tokens"] < 200
        for path, body in (
            ("/v1/messages", prompt(2)),
            ("/generate", b"{"),
            ("/generate", b'{"text": "no tokenizer"}'),
        ):
            assert json.loads(ask(address, f"/route?path={path}", body)[1]) == {"server": None}
        assert ask(address, "/health")[0] == 200
        status = json.loads(ask(address, "/status")[1])
        assert status["requests"]["not_by_text"] == 3
        metrics = ask(address, "/metrics")[1].decode()
        assert 'sglang:pic_route_requests_total{result="not_by_text"} 3\n' in metrics
        assert 'sglang:pic_route_server_up{server="http://a"} 1\n' in metrics
        sidecar.fleet.leave_silent(time.monotonic() + 60)
        assert json.loads(ask(address, "/route", prompt(2))[1]) == {"server": None}


def test_a_large_prompt_delays_nobody() -> None:
    """800,000 delimiters take seconds to cut: in a process apart, and whoever waits for that has an answer in time."""
    sidecar = sidecar_of(["http://a"])
    large = b'{"input_ids": [' + b",".join([b"7"] * 500_000) + b"]}"
    assert len(large) < MAX_BODY_BYTES
    with running(sidecar) as address:
        while not sidecar._counts["named"]:
            ask(address, "/route", prompt(1))
        others = [threading.Thread(target=ask, args=(address, "/route", large)) for _ in range(12)]
        for other in others:
            other.start()
        waits = []
        while any(other.is_alive() for other in others):
            begun = time.monotonic()
            ask(address, "/route", prompt(2))
            waits.append(time.monotonic() - begun)
        begun = time.monotonic()
        too_large = ask(address, "/route", bytes(10_000_000))
        assert time.monotonic() - begun < 2
        assert json.loads(too_large[1]) == {"server": None}
    assert statistics.median(waits) < 0.2
    assert sidecar._counts["busy"] > 0 < sidecar._counts["too_late"]
    assert sidecar._counts["too_large"] == 1


def test_an_answer_that_is_late_names_no_server() -> None:
    sidecar = Sidecar({"http://a": "tcp://127.0.0.1:9"}, SALT, _Slow())
    with running(sidecar) as address:
        begun = time.monotonic()
        assert json.loads(ask(address, "/route", prompt(1))[1]) == {"server": None}
        assert time.monotonic() - begun < DEADLINE_S + 0.5
        host, port = address.split(":")
        # So is a body that does not come.
        with socket.create_connection((host, int(port)), timeout=5) as half:
            half.sendall(b"POST /route HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{")
            assert b"null" in half.recv(4096)
    assert sidecar._counts["too_late"] == 2


def test_a_process_that_ends_is_replaced() -> None:
    async def sketch() -> None:
        workers = Workers(None, SALT)
        try:
            assert await workers.sketch(prompt(1), CUTTING) is not None
            for process in workers._workers[0]._pool._processes.values():
                process.kill()
            with pytest.raises(BrokenProcessPool):
                await workers.sketch(prompt(1), CUTTING)
            assert await workers.sketch(prompt(1), CUTTING) is not None
        finally:
            workers.stop()

    asyncio.run(sketch())


_KILLED = """
import asyncio, multiprocessing, os
from tests.unit.test_route_live import CUTTING, SALT, Workers, prompt
async def sketch():
    workers = Workers(None, SALT)
    await workers.sketch(prompt(1), CUTTING)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(sketch())
"""


def test_processes_end_with_a_parent_that_is_killed() -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


class StandIn(ThreadingHTTPServer):
    """A server that says its name, and what headers it was sent."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self._say(json.dumps({"server": server.name, "headers": dict(self.headers)}).encode())

            def do_GET(self) -> None:
                self._say(b"")

            def _say(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

            def handle(self) -> None:
                # HAProxy resets the connections of its health checks.
                with suppress(ConnectionResetError):
                    super().handle()

        server = self
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = f"127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


def configuration(servers: list[str], sidecar: str, listen: str, capsys: pytest.CaptureFixture[str]) -> str:
    words = [f"--server=http://{server}=tcp://127.0.0.1:{number}" for number, server in enumerate(servers, 1)]
    host, port = sidecar.split(":")
    assert main(["route", *words, "--haproxy", listen, "--host", host, "--port", port]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy: apt-get install haproxy")
def test_haproxy_sends_requests_where_their_text_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = [StandIn() for _ in range(3)]
    names, listen, path = [server.name for server in servers], f"127.0.0.1:{free_port()}", tmp_path / "haproxy.cfg"
    sidecar = sidecar_of([f"http://{name}" for name in names])
    with ExitStack() as stack:
        address = stack.enter_context(running(sidecar))
        for seed, name in enumerate(names):
            hold(sidecar, f"http://{name}", seed)
        while not sidecar._counts["named"]:
            ask(address, "/route", prompt(9))
        path.write_text(configuration(names, address, listen, capsys))
        subprocess.run(["haproxy", "-c", "-f", path], check=True, capture_output=True)
        haproxy = stack.enter_context(subprocess.Popen(["haproxy", "-db", "-f", path], stdout=subprocess.DEVNULL))
        stack.callback(haproxy.terminate)
        _wait_for(listen)

        def reached(body: bytes, path: str = "/generate", **headers: str) -> dict[str, Any]:
            status, answer = ask(listen, path, body, {each.replace("_", "-"): headers[each] for each in headers})
            assert status == 200
            return json.loads(answer)

        assert [reached(prompt(seed))["server"] for seed in (0, 1, 2, 0, 1, 2)] == names * 2
        kept = reached(prompt(1), x_smg_target_worker="0", TE="trailers", Accept="text/*")["headers"]
        assert {each.lower() for each in kept} == {"host", "accept-encoding", "content-length", "accept"}
        # The sidecar is not asked for these, and no request waits for it.
        asked = sum(sidecar._counts.values())
        unasked: list[tuple[bytes, str, dict[str, str]]] = [
            (bytes(600_000), "/generate", {}),
            (prompt(1), "/v1/messages", {}),
            (prompt(1), "/generate", {"x_pic_mode": "off"}),
            (prompt(1), "/generate", {"x_request_id_pic_edit": "notes"}),
        ]
        for body, of, headers in unasked:
            assert reached(body, of, **headers)["server"] in names
        assert sum(sidecar._counts.values()) == asked
        assert ask(listen, "/generate", b"", {"Content-Length": "99999999"})[0] == 413
        # Bytes that are no ASCII are a server's affair.
        assert {reached(prompt(1), x_name="caf\u00e9")["server"] for _ in range(9)} == {names[1]}
        salted_text = wire.namespace_bytes(None, "tenant")
        sidecar.fleet.balancer.index.add(f"http://{names[2]}", cut(text(5), salted_text, SALT).names.tolist())
        assert reached(prompt(5), x_request_id_pic_salt="tenant")["server"] == names[2]
        assert reached(prompt(5), x_pic_salt="tenant")["server"] == names[2]
        # A server that is gone, and then the sidecar.
        servers[1].stop()
        assert reached(prompt(1))["server"] in (names[0], names[2])
        sidecar._sketches = _Slow()
        begun = time.monotonic()
        assert reached(prompt(2))["server"] in (names[0], names[2])
        assert time.monotonic() - begun < 2
    for server in (servers[0], servers[2]):
        server.stop()


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            ask(address, "/")
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "99999"], "--port=99999: must be 1 to 65535"),
        (["--port", "0"], "--port=0: must be"),
        (["--server", "a:1"], "must be like http"),
        (["--server", "http://a=tcp://b:1"], "must be like http"),
        (["--server", "http://a:1=tcp://b:1"], "two have the same URL"),
        (["--haproxy", "here"], "--haproxy 'here': must be like"),
        ([], "--salt-file"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--server", "http://a:1=tcp://a:2", *words]) == 2
    assert message in capsys.readouterr().err
