"""What a response's headers say of its splices, and what a refused switch of a running server is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pic import __version__
from sglang_pic.adapter import server_info
from sglang_pic.adapter.features.audit.report import RESUME_KEY
from sglang_pic.adapter.serve.frontend import Refusals, _validate, _with_noted_hits, _with_reasons
from sglang_pic.adapter.serve.modes import SWITCH_KEY
from sglang_pic.config import load_config
from sglang_pic.errors import ConfigError

OURS = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend="pic"))
STOCK = SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend=None))
START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
END = {"type": "http.response.body", "body": b"whole"}
Send = Callable[[Any], Awaitable[None]]


async def outputs(*details: dict[str, Any] | None) -> AsyncIterator[dict[str, Any]]:
    """A prompt's outputs as SGLang makes them, each with these details."""
    for each in details:
        yield {"text": "a", "meta_info": {} if each is None else {"cached_tokens_details": each}}


async def read(manager: Any, *details: dict[str, Any] | None) -> list[Any]:
    """Generate a prompt's outputs as SGLang does, behind the hook."""
    prompt = SimpleNamespace(
        sampling_params={}, extra_key=None, input_ids=[1], contains_mm_input=lambda: False, stream=False
    )
    _validate(manager, prompt, [1])
    whole = outputs(*details)
    hooked = _with_noted_hits(whole, manager, prompt)
    return [output async for output in (hooked or whole)]


def sent_by(app: Callable[[Send], Awaitable[None]]) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def whole(_scope: object, _receive: object, send: Send) -> None:
        await app(send)

    asyncio.run(Refusals(whole)({"type": "http", "headers": []}, None, send))
    return sent


def headers_of(app: Callable[[Send], Awaitable[None]]) -> dict[str, str]:
    start, *_ = sent_by(app)
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
    assert headers_of(answering(OURS, [details])) == {"x-pic-spliced": "7", "x-pic-behind-change": "5"}
    off = {"pic": 0, "pic_reason": "off"}
    assert headers_of(answering(OURS, [off])) == {"x-pic-spliced": "0", "x-pic-reason": "off"}
    assert headers_of(answering(OURS, [None])) == {"x-pic-spliced": "0"}, "nothing was cached"
    assert headers_of(answering(OURS, [details, details], [off])) == {
        "x-pic-spliced": "7",
        "x-pic-behind-change": "5",
        "x-pic-reason": "off",
    }, "several prompts are added up, each once"
    assert headers_of(answering(STOCK, [details])) == {}
    assert START["headers"] == [(b"a", b"b")], "the application's message is left alone"


def test_a_stream_whose_start_is_kept_until_a_prompt_is_admitted_has_the_headers_too() -> None:
    async def app(send: Send) -> None:
        await send(START)
        await read(OURS, {"pic": 3})
        await send({**END, "more_body": True})
        await send(END)

    assert headers_of(app) == {"x-pic-spliced": "3"}


def test_outside_an_http_server_nothing_is_wrapped() -> None:
    assert _with_noted_hits(outputs(), OURS, None) is None


def test_an_abandoned_prompt_closes_sglangs_generator() -> None:
    closed: list[bool] = []

    async def endless() -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield {"meta_info": {}}
        finally:
            closed.append(True)

    async def app(send: Send) -> None:
        hooked = _with_noted_hits(endless(), OURS, None)
        assert hooked is not None
        await hooked.__anext__()
        await hooked.aclose()
        await send(START)
        await send(END)

    sent_by(app)
    assert closed == [True]


def switched(answers: list[bool], **server_args: float) -> Any:
    """What the HTTP server answers to `/set_internal_state`: a list, or the message of an HTTP 400."""

    async def updated() -> list[bool]:
        return answers

    async def app(send: Send) -> None:
        coroutine = updated()
        hooked = _with_reasons(coroutine, OURS, SimpleNamespace(server_args=server_args))
        found = await (coroutine if hooked is None else hooked)
        await send(START)
        await send({"type": "http.response.body", "body": found})

    start, body = sent_by(app)
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
        sent_by(app)


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
