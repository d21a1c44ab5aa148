"""What the HTTP server answers where the plugin refuses, also behind SGLang's 200, and what headers say of splices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pic import __version__
from sglang_pic.adapter import server_info
from sglang_pic.adapter.features.audit.report import RESUME_KEY
from sglang_pic.adapter.serve.frontend import Refusals, _take_headers, _validate, _with_noted_hits, _with_reasons
from sglang_pic.adapter.serve.modes import SWITCH_KEY
from sglang_pic.config import load_config
from sglang_pic.errors import ConfigError

MANAGER = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend="pic"))
STOCK = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend="default"))
START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
END = {"type": "http.response.body", "body": b""}
Send = Callable[[Any], Awaitable[None]]


def event(text: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


def prompt(*, has_media: bool = False, **fields: object) -> Any:
    given = {"sampling_params": {}, "extra_key": None, "input_ids": None, "cache_salt": None, "stream": False, **fields}
    return SimpleNamespace(**given, contains_mm_input=lambda: has_media)


def validate(obj: Any, input_ids: list[int] | None = None) -> None:
    """As SGLang calls the check of one prompt, and sends its refusal as an event."""
    _validate(MANAGER, obj, [1] if input_ids is None else input_ids)


GOOD, BAD = prompt(), prompt(sampling_params=[{}])


def answered(app: Callable[[Send], Awaitable[None]], *names: tuple[str, str]) -> list[Any]:
    """What the server sends while SGLang's application is `app`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def whole(_scope: object, _receive: object, send: Send) -> None:
        # In a task of its own, as Starlette answers.
        await asyncio.create_task(app(send))  # type: ignore[arg-type]

    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in names]}
    asyncio.run(Refusals(whole)(scope, None, send))
    return sent


def is_refused(sent: list[Any]) -> bool:
    """Whether it is one whole answer with HTTP 400 that says why."""
    start, body = sent
    error = json.loads(body["body"])["error"]
    return start["status"] == error["code"] == 400 and "must be an object" in error["message"]


async def streamed(send: Send, *steps: dict[str, Any] | Any) -> None:
    """A stream of messages and of prompts, which are checked in between; a refusal is its last event."""
    await send(START)
    try:
        for step in steps:
            if isinstance(step, dict):
                await send(step)
            else:
                validate(step)
    except ConfigError as error:
        await send(event(str(error)))
    await send(END)


@pytest.mark.parametrize(
    "steps",
    [[BAD], [event("response.created"), BAD], [GOOD, BAD], [event("created"), GOOD, BAD]],
    ids=["refused", "event-refused", "prompt-refused", "event-prompt-refused"],
)
def test_a_stream_that_is_refused_before_its_first_token_is_an_http_400(steps: list[Any]) -> None:
    assert is_refused(answered(lambda send: streamed(send, *steps)))


def test_a_stream_that_is_served_is_sent_as_it_is() -> None:
    steps = [event("response.created"), GOOD, event("a"), event("b")]
    whole = [START, *(step for step in steps if step is not GOOD), END]
    assert answered(lambda send: streamed(send, *steps)) == whole

    async def looked_at(send: Send) -> None:
        arrived: list[Any] = []

        async def kept(message: Any) -> None:
            arrived.append(message)
            await send(message)

        async def app(_scope: object, _receive: object, send: Send) -> None:
            await send(START)
            await send(event("created"))
            assert arrived == [], "it can still be refused"
            validate(GOOD)
            await send(event("a"))
            assert arrived == [START, event("created"), event("a")], "a token is sent at once"
            await send(END)

        await Refusals(app)({"type": "http", "headers": []}, None, kept)

    assert answered(looked_at)[-1] == END


def test_a_refusal_after_the_first_token_ends_the_stream_as_sglang_ends_it() -> None:
    """A tool's answer is a second prompt of one response."""
    sent = answered(lambda send: streamed(send, GOOD, event("a"), BAD))
    assert sent[:2] == [START, event("a")]
    assert b"must be an object" in sent[2]["body"]


def test_answers_of_sglang_are_left_alone() -> None:
    own = {**START, "status": 400}, {"type": "http.response.body", "body": b"sglang's"}

    async def refused(send: Send) -> None:
        with pytest.raises(ConfigError):
            validate(BAD)
        for message in own:
            await send(message)

    async def plain(send: Send) -> None:
        for message in (START, event("a metric"), END):
            await send(message)

    assert answered(refused) == list(own), "it has the form of its endpoint"
    assert answered(plain) == [START, event("a metric"), END], "nothing was generated"


def test_a_header_with_a_mistake_in_its_name_is_refused_on_every_path() -> None:
    """A gateway that misspells the salt's name would leave its tenants in one namespace."""

    async def unreached(_send: Send) -> None:
        raise AssertionError

    for name in ("x-pic-slat", "x-request-id-pic-sal", "x_pic_salt"):
        start, body = answered(unreached, (name, "a"))
        assert (start["status"], "x-pic-salt is the nearest" in body["body"].decode()) == (400, True)


@pytest.mark.parametrize("fields", [{"has_media": True}, {"session_params": {"id": "s"}}, {"input_embeds": [[0.5]]}])
def test_a_prompt_without_tokens_is_refused_unless_it_gets_them_later(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no tokens"):
        validate(prompt(), [])
    validate(prompt(**fields), [])
    from starlette.datastructures import Headers

    request = SimpleNamespace(headers=Headers({}))
    with pytest.raises(ConfigError, match="has no tokens"):
        _take_headers(MANAGER, prompt(input_ids=[]), request)
    _take_headers(MANAGER, prompt(input_ids=[], **fields), request)
    _validate(STOCK, prompt(), [])


async def outputs(*details: dict[str, Any] | None) -> AsyncIterator[dict[str, Any]]:
    """A prompt's outputs as SGLang makes them, each with these details."""
    for each in details:
        yield {"text": "a", "meta_info": {} if each is None else {"cached_tokens_details": each}}


async def read(manager: Any, *details: dict[str, Any] | None) -> list[Any]:
    """Generate a prompt's outputs as SGLang does, behind the hook."""
    _validate(manager, asked := prompt(), [1])
    whole = outputs(*details)
    hooked = _with_noted_hits(whole, manager, asked)
    return [output async for output in (hooked or whole)]


def headers_of(app: Callable[[Send], Awaitable[None]]) -> dict[str, str]:
    start, *_ = answered(app)
    assert start["headers"][0] == (b"a", b"b")
    return {name.decode(): value.decode() for name, value in start["headers"][1:]}


def answering(manager: Any, *prompts: list[dict[str, Any] | None]) -> Callable[[Send], Awaitable[None]]:
    async def app(send: Send) -> None:
        for details in prompts:
            assert len(await read(manager, *details)) == len(details), "no output is lost"
        await send(START)
        await send(END)

    return app


def test_a_response_says_what_was_spliced() -> None:
    details = {"device": 9, "host": 0, "pic": 7, "pic_behind_change": 5}
    assert headers_of(answering(MANAGER, [details])) == {"x-pic-spliced": "7", "x-pic-behind-change": "5"}
    off = {"pic": 0, "pic_reason": "off"}
    assert headers_of(answering(MANAGER, [off])) == {"x-pic-spliced": "0", "x-pic-reason": "off"}
    assert headers_of(answering(MANAGER, [None])) == {"x-pic-spliced": "0"}, "nothing was cached"
    assert headers_of(answering(MANAGER, [details, details], [off])) == {
        "x-pic-spliced": "7",
        "x-pic-behind-change": "5",
        "x-pic-reason": "off",
    }, "several prompts are added up, each once"
    assert headers_of(answering(STOCK, [details])) == {}
    assert START["headers"] == [(b"a", b"b")], "the application's message is left alone"


def test_a_stream_whose_start_is_kept_until_a_prompt_is_admitted_has_the_headers_too() -> None:
    async def app(send: Send) -> None:
        await send(START)
        await read(MANAGER, {"pic": 3})
        await send({**END, "more_body": True})
        await send(END)

    assert headers_of(app) == {"x-pic-spliced": "3"}


def test_outside_an_http_server_nothing_is_wrapped() -> None:
    assert _with_noted_hits(outputs(), MANAGER, None) is None


def test_an_abandoned_prompt_closes_sglangs_generator() -> None:
    closed: list[bool] = []

    async def endless() -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield {"meta_info": {}}
        finally:
            closed.append(True)

    async def app(send: Send) -> None:
        hooked = _with_noted_hits(endless(), MANAGER, None)
        assert hooked is not None
        await hooked.__anext__()
        await hooked.aclose()
        await send(START)
        await send(END)

    answered(app)
    assert closed == [True]


def switched(answers: list[bool], **server_args: float) -> Any:
    """What the HTTP server answers to `/set_internal_state`: a list, or the message of an HTTP 400."""

    async def updated() -> list[bool]:
        return answers

    async def app(send: Send) -> None:
        coroutine = updated()
        hooked = _with_reasons(coroutine, MANAGER, SimpleNamespace(server_args=server_args))
        found = await (coroutine if hooked is None else hooked)
        await send(START)
        await send({"type": "http.response.body", "body": found})

    start, body = answered(app)
    return body["body"] if start["status"] == 200 else (start["status"], body["body"].decode())


def test_a_refused_switch_says_what_is_allowed() -> None:
    status, said = switched([False], pic_mod=0)
    assert status == 400
    assert "pic_mod=0: refused, nothing was changed" in said
    assert "pic_mode: 0 (off) or 1 (auto)" in said
    assert "did you mean 'pic_mode'?" in said
    assert "pic_mode=2" in switched([False], pic_mode=2)[1]
    assert switched([True], pic_mode=0) == [True]
    assert switched([False, True], pic_audit_resume=1) == [False, True], "one rank has the namespace"
    assert switched([False], pp_max_micro_batch_size=0) == [False], "SGLang's own keys are SGLang's to answer"


def test_the_front_end_names_the_keys_that_schedulers_take() -> None:
    assert {SWITCH_KEY, RESUME_KEY} == server_info.SWITCHES.keys()


def test_an_error_of_another_kind_stays_an_error() -> None:
    async def app(_send: Send) -> None:
        raise ConfigError("not of a request")

    with pytest.raises(ConfigError):
        answered(app)


def test_server_info_has_the_version_and_the_configuration_without_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: dict[str, Callable[..., Any]] = {}
    monkeypatch.setattr(server_info, "hook", lambda _, name, function: hooks.__setitem__(name, function))
    monkeypatch.setenv("SGLANG_PIC_CONFIG", '{"core": {"preset": "most"}, "opt_in": ["secret"]}')
    server_info.install(load_config(), {}, dict, None)
    shown = SimpleNamespace(internal_state={})
    (add_entry,) = hooks.values()
    add_entry(shown, None, None)
    entry = shown.internal_state["pic"]
    assert (entry["version"], entry["config"]["core"]["tail_tokens"]) == (__version__, 0)
    assert entry["config"]["opt_in"] == ("*",)
    assert "secret" not in repr(entry)
