"""What the HTTP server answers to requests that the plugin refuses, also where SGLang has answered 200 already."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pic.adapter.serve.frontend import Refusals, _take_headers, _validate
from sglang_pic.errors import ConfigError

MANAGER = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend="pic"))
START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b""}
Send = Callable[[Any], Awaitable[None]]


def event(text: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


def prompt(*, has_media: bool = False, **fields: object) -> Any:
    given = {"sampling_params": {}, "extra_key": None, "input_ids": None, "cache_salt": None, **fields}
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
    other = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend="default"))
    _validate(other, prompt(), [])
