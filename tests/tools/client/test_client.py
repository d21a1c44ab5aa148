"""The client: messages are edited by pure functions; a stand-in for the server sees what is sent, kept and compiled."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.cli import main
from sglang_pic.client import AsyncSkills, Message, Receipt, Skills, compose, edit
from sglang_pic.errors import ConfigError, ServerError

httpx = pytest.importorskip("httpx")
HOWS = ["erratum", "field+erratum", "hoist"]

_words = st.text(alphabet='ab:"= \\.{}é', max_size=6)
_fields = st.sampled_from(["shelf", "price", "shelf life"]).flatmap(
    lambda field: st.sampled_from([f"{field}: 7", f"  - {field} = a: b", f"{field}:", f"see {field}: no"])
)
_errata = ['Correction: "price" is now "1".', 'Correction: "shelf" is now "2".', "Correction: none"]
_lines = _words | _fields | st.sampled_from(_errata)
_members = st.sampled_from(['{"shelf": "B7", "price": 3}', '  "shelf" : null,', '{"price": "\\"shelf\\": 1"}'])
_texts = st.lists(_lines, max_size=4).map("\n".join)
_parts = _texts.map(lambda text: {"type": "text", "text": text}) | st.just({"type": "image_url", "image_url": {}})
_contents = _texts | st.none() | st.lists(_parts, max_size=3)


def _messages(contents: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Message]]:
    roles = st.sampled_from(["system", "user", "assistant", "tool"])
    each = st.fixed_dictionaries({"role": roles, "content": contents, "name": st.just("n")})
    holder: Message = {"role": "system", "content": "You keep shelves.\nshelf: A1\nBe brief."}
    return st.tuples(st.lists(each, max_size=3), st.lists(each, max_size=3)).map(lambda two: [*two[0], holder, *two[1]])


_prompts = _messages(_contents)
_values = st.text(alphabet='abé":7 .\\', min_size=1, max_size=6).map(str.strip).filter(bool)


def errata(messages: list[Message], field: str) -> list[str]:
    """Every erratum of a field, in order."""
    return [line for line in lines(messages) if line.startswith(f"Correction: {json.dumps(field)} is now ")]


def lines(messages: list[Message]) -> list[str]:
    contents = (message["content"] or () for message in messages)
    parts = ([each] if isinstance(each, str) else [part.get("text", "") for part in each] for each in contents)
    return [line for texts in parts for text in texts for line in text.split("\n")]


@given(_prompts, _values, _values, st.sampled_from(HOWS))
def test_edits_replace_each_other_and_mutate_nothing(messages: list[Message], a: str, b: str, how: str) -> None:
    before = copy.deepcopy(messages)
    once = edit(messages, "shelf", a, how)
    assert messages == before
    assert edit(once, "shelf", a, how) == once, "idempotent"
    assert edit(edit(once, "shelf", b, how), "shelf", a, how) == once, "A -> B -> A is A"
    last = lines(once)[-1]
    if how == "hoist":
        assert (last, errata(once, "shelf")) == (f"shelf: {a}", [])
        assert sum(line.lstrip(" -").startswith(("shelf:", "shelf =")) for line in lines(once)) == 1
    else:
        assert errata(once, "shelf") == [last]
        assert json.loads(last.removeprefix('Correction: "shelf" is now ').removesuffix(".")) == a


@given(_prompts, _values, st.sampled_from(HOWS))
def test_other_messages_and_other_lines_are_untouched(messages: list[Message], value: str, how: str) -> None:
    def others(found: list[Message]) -> list[str]:
        return [line for line in lines(found) if "shelf" not in line and line]

    edited = edit(messages, "shelf", value, how)
    assert others(edited) == others(messages)
    mentions = [any("shelf" in line for line in lines([message])) for message in messages]
    # The erratum is added to the last message that is left.
    kept = [message for message, names in zip(messages, mentions, strict=True) if not names][:-1]
    assert all(any(message is each for each in edited) for message in kept)
    assert errata(edited, "price") == errata(messages, "price")


@given(_messages(_members), _values)
def test_members_of_json_stay_json(messages: list[Message], value: str) -> None:
    state: Message = {"role": "user", "content": '{"shelf": "B7", "price": 3, "other": {"shelf": 1.5, "open": true}}'}
    edited = edit([*messages, state], "shelf", value, "field+erratum")
    member, erratum = edited[-1]["content"].split("\n")
    assert json.loads(member) == {"shelf": value, "price": 3, "other": {"shelf": _plain(value), "open": True}}
    assert errata(edited, "shelf") == [erratum]
    with pytest.raises(ConfigError, match="works for lines only, not in JSON"):
        edit([state], "shelf", value, "hoist")


def test_members_are_found_however_python_writes_them() -> None:
    for member in ('{"Größe": 5}', json.dumps({"Größe": 5})):
        (edited,) = edit([{"role": "user", "content": member}], "Größe", "6", "field+erratum")
        assert edited["content"] == member.replace("5", "6") + '\nCorrection: "Größe" is now "6".'


def test_what_only_resembles_an_erratum_stays_and_parts_may_have_no_text() -> None:
    said, image = 'Correction: "shelf" is now wrong, I think.', {"type": "image_url", "text": None, "image_url": {}}
    content = [{"type": "text", "text": f"shelf: A1\n{said}"}, image]
    for how in HOWS:
        ((first, second, *_),) = [
            each["content"] for each in edit([{"role": "user", "content": content}], "shelf", "B7", how)
        ]
        assert said in first["text"]
        assert second == image


def _plain(value: str) -> object:
    return int(value) if value.isascii() and value.isdigit() and (value == "0" or value[0] != "0") else value


def test_what_an_edit_looks_like() -> None:
    assert compose("", ["a skill"], "") == [{"role": "system", "content": "a skill"}], "what is empty is left out"
    assert compose("", "a skill", "") == compose("", ["a skill"], ""), "one text is no list of letters"
    messages = compose("You keep shelves.\n- shelf: A1\nBe brief.", [], "Where is it?")
    assert [each["content"] for each in edit(messages, "shelf", "B7")] == [
        messages[0]["content"],
        'Where is it?\nCorrection: "shelf" is now "B7".',
    ]
    both = edit(messages, "shelf", "B7", "field+erratum")
    assert both[0]["content"] == "You keep shelves.\n- shelf: B7\nBe brief."
    assert [each["content"] for each in edit(messages, "shelf", "B7", "hoist")] == [
        "You keep shelves.\nBe brief.",
        "Where is it?\nshelf: B7",
    ]
    answered = [*messages, {"role": "assistant", "content": "On A1."}]
    assert edit(answered, "shelf", "B7")[-1] == {"role": "user", "content": 'Correction: "shelf" is now "B7".'}


@pytest.mark.parametrize(
    ("field", "value", "how", "named"),
    [
        ("shelf", "B7", "in place", "how='in place': must be one of 'erratum', 'field\\+erratum', 'hoist'"),
        ("drawer", "B7", "erratum", "field='drawer': the messages must have"),
        ("shelf", "B\n7", "erratum", "value='B\\\\n7'"),
    ],
)
def test_bad_arguments_are_named(field: str, value: str, how: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        edit(compose("shelf: A1", [], "Where is it?"), field, value, how)


def test_a_skill_has_the_same_tokens_wherever_it_is_composed(model_dir: Callable[[str], Path]) -> None:
    """With a real tokenizer and chat template: as compiled, between other skills, in another order."""
    jinja2, tokenizers = pytest.importorskip("jinja2"), pytest.importorskip("tokenizers")
    folder = model_dir("smollm2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "chat_template.jinja").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(messages: list[Message]) -> list[int]:
        text = template.render(messages=messages, add_generation_prompt=False)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    skills = ["Refunds take 3 days.\n\n", " 'quoted' {json: 1}", "être 1\n2"]
    head = len(tokens(compose("You are a clerk.", [], "")))
    for skill in skills:
        block = tokens(compose("You are a clerk.", [skill], ""))[head:]
        assert skill.strip() in tokenizer.decode(block)
        for order in (skills, skills[::-1]):
            composed = tokens(compose("Another system prompt.", order, "What now?"))
            assert any(composed[i : i + len(block)] == block for i in range(len(composed)))


URL = "http://server:30000"
Capture = pytest.CaptureFixture[str]


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


class Replicas:
    """Ranks that serve requests of their own, as SGLang routes them: in turns, if a request names none."""

    def __init__(self) -> None:
        self.ranks, self.turn = [Server(), Server()], 0

    def __call__(self, request: Any) -> Any:
        if request.url.path == "/server_info":
            states = [rank(request).json()["internal_states"][0] for rank in self.ranks]
            for number, state in enumerate(states):
                state["pic"]["dp_rank"] = number
            return httpx.Response(200, json={"internal_states": states[::-1]})
        self.turn = 1 - self.turn
        return self.ranks[json.loads(request.content).get("routed_dp_rank", self.turn)](request)


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
        skills.compile("library", ["one", "two"], behind="system")
        assert [each["content"] for each in server.bodies[-1]["messages"]] == ["system", "one", "two"]


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


def test_every_rank_of_data_parallelism_compiles_and_drops_a_skill() -> None:
    """SGLang sends a request that names no rank to any, which may not be the one that has the pin."""
    server = Replicas()
    skills = connect(server)
    receipt = skills.compile("a", "the skill a")
    assert [len(rank.pins) for rank in server.ranks] == [1, 1]
    assert [(pin.name, pin.digest, pin.dp_rank) for pin in skills.list()] == [("a", receipt.digest, n) for n in (0, 1)]
    assert skills.ensure() == ()
    for rank in server.ranks:
        rank.pins.clear()
        assert skills.ensure() == (receipt,)
        assert len(skills.list()) == 2
    server.ranks[0].pins.clear()
    assert skills.drop("a")
    assert (skills.list(), skills.drop("a")) == ((), False)
    server.ranks[1].refuses.add("long")
    with pytest.raises(ServerError, match="did not keep 'long' on rank 1: "):
        skills.compile("long", "a skill")


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
    page = {"content-type": "text/html"}
    with pytest.raises(ServerError, match=r"HTTP 404: a web page; is this SGLang's address\?$"):
        connect(lambda _: httpx.Response(404, text="<!doctype html>", headers=page)).list()
    with pytest.raises(ServerError, match="shows no pins"):
        connect(lambda _: httpx.Response(200, text="<!doctype html>", headers=page)).list()
    for info in ({"internal_states": [{}]}, {"internal_states": [{"pic": {"audit": {}}}]}, {}):
        with pytest.raises(ServerError, match="start the server with --radix-cache-backend pic"):
            connect(lambda _, info=info: httpx.Response(200, json=info)).list()
    prefix_only = {"internal_states": [{"pic": {"prefix_only": {"reason": "recurrent state"}, "modes": {}}}]}
    with pytest.raises(ServerError, match=r"keeps no skills, .* prefixes only \(recurrent state\): put the skill"):
        connect(lambda _: httpx.Response(200, json=prefix_only)).compile("refunds", "a skill")


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


def test_the_verb(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    transport = httpx.MockTransport(server)
    monkeypatch.setattr(Skills, "_connect", staticmethod(lambda _: httpx.Client(transport=transport)))
    (tmp_path / "refunds.md").write_text("Refunds take 3 days.")
    (tmp_path / "system.txt").write_text("You are a clerk.")
    assert main(["skill", "compile", "refunds", "refunds.md", "--behind", "system.txt"]) == 0
    assert capsys.readouterr().out.startswith("refunds  36 tokens  ")
    assert main(["skill", "list", "--json"]) == 0
    assert [pin["name"] for pin in json.loads(capsys.readouterr().out)] == ["refunds"]
    assert [main(["skill", "drop", "refunds"]) for _ in range(2)] == [0, 1]
    monkeypatch.setenv("SGLANG_PIC_API_KEY", "secret")
    monkeypatch.setenv("SGLANG_PIC_CACHE_SALT", "ours")
    assert main(["skill", "compile", "refunds", "refunds.md"]) == 0
    assert (server.headers[-1]["Authorization"], server.bodies[-1]["cache_salt"]) == ("Bearer secret", "ours")
    assert main(["skill", "compile", "x", "missing.md"]) == 2
    assert "missing.md: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["sk-\u2026", "sk-1\n"])
def test_a_key_that_no_header_takes_is_named_and_never_shown(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The ellipsis of a shortened key, the line end of a file."""
    monkeypatch.setenv("SGLANG_PIC_API_KEY", key)
    pytest.importorskip("pic_bench")
    for words in (
        ["skill", "list"],
        ["check", "http://127.0.0.1:1", "sample:agents"],
        ["replay", "sample:agents", "--base-url", "http://127.0.0.1:1", "--out", "never"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("sglang-pic: error: SGLANG_PIC_API_KEY: has a line end")
        assert "sk-" not in said
