"""The client against a stand-in for the server: what is sent, what is kept, what is compiled again."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_pic.cli import main
from sglang_pic.client import AsyncSkills, Receipt, Skills, compose
from sglang_pic.errors import ConfigError, ServerError

httpx = pytest.importorskip("httpx")
URL = "http://server:30000"


class Server:
    """Keeps pins as the plugin does, and every request."""

    def __init__(self) -> None:
        self.pins: dict[tuple[str, str | None, str | None], dict[str, Any]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.refuses: set[str] = set()

    def __call__(self, request: Any) -> Any:
        self.headers.append(request.headers)
        if request.url.path == "/server_info":
            pins = {"max_tokens": 1000, "num_tokens": 0, "held": list(self.pins.values())}
            return httpx.Response(200, json={"version": "x", "internal_states": [{"pic": {"pins": pins}}]})
        assert (request.method, request.url.path) == ("POST", "/v1/chat/completions")
        body = json.loads(request.content)
        self.bodies.append(body)
        options = body["custom_params"]["pic"]
        key, salt = body.get("extra_key"), body.get("cache_salt")
        if options.get("pin") == "bad name":
            return httpx.Response(400, json={"message": "pin='bad name': must be a name"})
        if "unpin" in options:
            self.pins.pop((options["unpin"], key, salt), None)
        name = options.get("pin")
        if name and name not in self.refuses:
            digest = hashlib.sha256(json.dumps([key, salt, body["messages"]]).encode()).hexdigest()[:16]
            tokens = sum(len(each["content"]) for each in body["messages"])
            pin = {"name": name, "tokens": tokens, "digest": digest, "extra_key": key, "has_salt": salt is not None}
            self.pins.pop((name, key, salt), None)
            self.pins[name, key, salt] = pin
        return httpx.Response(200, json={"choices": []})

    def skills(self, **settings: Any) -> Skills:
        """A client of this server."""
        return connect(self, **settings)


def connect(answer: Callable[[Any], Any], **settings: Any) -> Skills:
    return Skills(URL + "/", http=httpx.Client(transport=httpx.MockTransport(answer)), **settings)


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_skill_is_sent_as_compose_puts_it_and_kept_under_its_name(server: Server) -> None:
    with server.skills(model="m", api_key="secret") as skills:
        receipt = skills.compile("refunds", "Refunds take 3 days.", behind="You are a clerk.")
        (body,) = server.bodies
        assert body == {
            "model": "m",
            "messages": compose("You are a clerk.", ["Refunds take 3 days."], ""),
            "max_tokens": 1,
            "custom_params": {"pic": {"pin": "refunds"}},
        }
        assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)
        (pin,) = skills.list()
        assert receipt == Receipt(name=pin.name, tokens=pin.tokens, digest=pin.digest)
        assert receipt.tokens == 36
        assert skills.drop("refunds")
        assert skills.list() == ()
        assert not skills.drop("refunds")
        assert skills.ensure() == (), "what was dropped is not compiled again"


def test_several_texts_are_compiled_in_one_pass(server: Server) -> None:
    server.skills().compile("library", ["one", "two"], behind="system")
    assert [each["content"] for each in server.bodies[0]["messages"]] == ["system", "one", "two"]


def test_ensure_compiles_what_is_lost_or_replaced_and_nothing_else(server: Server) -> None:
    skills = server.skills()
    receipts = [skills.compile(name, f"the skill {name}", behind="system") for name in ("a", "b", "c")]
    assert skills.ensure() == ()
    del server.pins["b", None, None]
    server.skills().compile("c", "another client's text of this name")
    before = len(server.bodies)
    assert skills.ensure() == tuple(receipts[1:])
    assert [body["messages"][-1]["content"] for body in server.bodies[before:]] == ["the skill b", "the skill c"]
    assert skills.ensure() == ()
    skills.compile("a", "a newer text")
    server.pins.clear()
    assert [receipt.name for receipt in skills.ensure()] == ["b", "c", "a"]
    assert server.bodies[-1]["messages"][0]["content"] == "a newer text"


def test_a_library_lets_another_process_ensure(server: Server, tmp_path: Path) -> None:
    library = tmp_path / "skills.json"
    receipt = server.skills(library=library).compile("a", "ä skill", behind="system")
    server.pins.clear()
    assert server.skills(library=library).ensure() == (receipt,)
    server.skills(library=library).drop("a")
    server.pins.clear()
    assert server.skills(library=library).ensure() == ()
    library.write_text('{"skills": 3}')
    with pytest.raises(ConfigError, match=r"skills\.json: not a library"):
        server.skills(library=library)


def test_namespaces_do_not_see_each_other(server: Server) -> None:
    plain = server.skills()
    tenant, salted = server.skills(extra_key="tenant"), server.skills(extra_key="tenant", cache_salt="salt")
    for skills in (plain, tenant, salted):
        skills.compile("a", "a skill")
    assert len({skills.list()[0].digest for skills in (plain, tenant, salted)}) == 3
    tenant.drop("a")
    assert [len(skills.list()) for skills in (plain, tenant, salted)] == [1, 0, 1]
    assert salted.ensure() == ()


def test_what_goes_wrong_is_one_error(server: Server) -> None:
    server.refuses.add("long")
    with pytest.raises(ServerError, match=r"did not keep 'long': .*pin_max_percent"):
        server.skills().compile("long", "a skill")
    with pytest.raises(ServerError, match=r"HTTP 400: .*pin='bad name': must be a name"):
        server.skills().compile("bad name", "a skill")

    def dead(request: Any) -> Any:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ServerError, match="GET http://server:30000/server_info: refused; is the server up"):
        connect(dead).list()
    for info in ({"internal_states": [{}]}, {"internal_states": [{"pic": {"audit": {}}}]}, {}):
        with pytest.raises(ServerError, match="start the server with --radix-cache-backend pic"):
            connect(lambda _, info=info: httpx.Response(200, json=info)).list()


def test_the_same_with_asyncio(server: Server) -> None:
    async def work() -> None:
        http = httpx.AsyncClient(transport=httpx.MockTransport(server))
        async with AsyncSkills(URL, http=http, extra_key="tenant") as skills:
            receipts = [await skills.compile(name, f"the skill {name}") for name in "ab"]
            assert [pin.digest for pin in await skills.list()] == [receipt.digest for receipt in receipts]
            server.pins.clear()
            assert list(await skills.ensure()) == receipts
            assert await skills.drop("a")
            assert [pin.name for pin in await skills.list()] == ["b"]
            with pytest.raises(ServerError, match="HTTP 400"):
                await skills.compile("bad name", "a skill")

    asyncio.run(work())


def test_the_verb(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    transport = httpx.MockTransport(server)
    monkeypatch.setattr(Skills, "_connect", staticmethod(lambda _: httpx.Client(transport=transport)))
    (tmp_path / "refunds.md").write_text("Refunds take 3 days.")
    (tmp_path / "system.txt").write_text("You are a clerk.")
    assert main(["skill", "compile", "refunds", "refunds.md", "--behind", "system.txt"]) == 0
    assert capsys.readouterr().out.startswith("refunds  36 tokens  ")
    assert main(["skill", "list", "--json"]) == 0
    assert [pin["name"] for pin in json.loads(capsys.readouterr().out)] == ["refunds"]
    server.pins.clear()
    assert main(["skill", "ensure", "--base-url", URL]) == 0
    assert capsys.readouterr().out.startswith("refunds  36 tokens  ")
    assert [main(["skill", "drop", "refunds"]) for _ in range(2)] == [0, 1]
    assert main(["skill", "compile", "x", "missing.md"]) == 2
    assert "missing.md: cannot be read" in capsys.readouterr().err
