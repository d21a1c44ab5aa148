"""`Skills` and `AsyncSkills`: compile texts on a server, pin their rows by name, drop them, compile lost ones again."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from sglang_pic.client.messages import Message, compose
from sglang_pic.errors import ServerError

if TYPE_CHECKING:
    import httpx


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The pin that a server made for a skill."""

    name: str
    tokens: int
    """Tokens of the system prompt and the skill, in whole pages."""
    digest: str
    """Hash of namespace and tokens; it changes with the text, the tokenizer and the chat template."""


class _Compiled(NamedTuple):
    receipt: Receipt
    behind: str
    texts: tuple[str, ...]


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A pinned prompt, as `/server_info` shows it."""

    name: str
    tokens: int
    digest: str
    extra_key: str | None = None
    has_salt: bool = False
    dp_rank: int | None = None
    """The rank that has it, if several serve requests of their own."""


class _Call(NamedTuple):
    method: str
    path: str
    body: dict[str, Any] | None = None


_T = TypeVar("_T")
_Http = TypeVar("_Http")
_Flow = Generator[_Call, bytes, _T]
"""The calls of one method, one after the other; both clients send them."""


class _Client(Generic[_Http]):
    """The calls that the synchronous and the asynchronous client share."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "default",
        api_key: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        timeout_s: float = 600.0,
        http: _Http | None = None,
    ) -> None:
        self._url, self._model = url.rstrip("/"), model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        namespace = {"extra_key": extra_key, "cache_salt": cache_salt}
        self._namespace = {key: value for key, value in namespace.items() if value is not None}
        # By name, oldest first; from `compile` until `drop`.
        self._compiled: dict[str, _Compiled] = {}
        self._http = self._connect(timeout_s) if http is None else http

    @staticmethod
    def _connect(timeout_s: float) -> _Http:
        raise NotImplementedError

    def _compile(self, name: str, text: str | Sequence[str], behind: str) -> _Flow[Receipt]:
        texts = (text,) if isinstance(text, str) else tuple(text)
        ranks, _ = yield from self._read()
        yield from self._chat(ranks, compose(behind, texts, ""), pin=name)
        # The server lists the oldest pin first, so the last one of a rank is ours.
        pins = {pin.dp_rank: pin for pin in (yield from self._list()) if pin.name == name}
        for rank in ranks:
            if rank not in pins:
                on_rank = "" if rank is None else f" on rank {rank}"
                raise ServerError(
                    f"{self._url} did not keep {name!r}{on_rank}: the prompt is longer than `pin_max_percent` allows, "
                    "or newer pins or requests needed its memory; `sglang:pic_pins_ended_total` says which."
                )
        receipt = Receipt(name=name, tokens=pins[ranks[0]].tokens, digest=pins[ranks[0]].digest)
        self._compiled.pop(name, None)
        self._compiled[name] = _Compiled(receipt, behind, texts)
        return receipt

    def _list(self) -> _Flow[tuple[Pin, ...]]:
        return (yield from self._read())[1]

    def _read(self) -> _Flow[tuple[list[int | None], tuple[Pin, ...]]]:
        """The ranks that serve requests of their own, each with its own pins, and all pins in this namespace.

        SGLang sends a request to the rank that it names, else to any. `[None]`: there is one rank.
        """
        answer = yield _Call("GET", "/server_info")
        try:
            info = msgspec.json.decode(answer, type=_ServerInfo)
        except msgspec.DecodeError as error:
            raise self._no_pins(str(error)) from error
        mine = (self._namespace.get("extra_key"), bool(self._namespace.get("cache_salt")))
        plugins = sorted((state.pic for state in info.internal_states), key=lambda plugin: plugin.dp_rank or 0)
        held = [msgspec.structs.replace(pin, dp_rank=each.dp_rank) for each in plugins for pin in self._held(each)]
        pins = tuple(pin for pin in held if (pin.extra_key, pin.has_salt) == mine)
        return [plugin.dp_rank for plugin in plugins] or [None], pins

    def _held(self, plugin: _Plugin) -> list[Pin]:
        if plugin.pins is not None:
            return plugin.pins.held
        if plugin.prefix_only is None:
            raise self._no_pins("no `pins` under `pic`")
        raise ServerError(
            f"{self._url} keeps no skills, because it reuses exact prefixes only ({plugin.prefix_only.reason}): put "
            "the skill before all that changes in your prompts, and SGLang's prefix cache has it."
        )

    def _no_pins(self, why: str) -> ServerError:
        return ServerError(
            f"{self._url}/server_info shows no pins ({why}): start the server with --radix-cache-backend pic."
        )

    def _drop(self, name: str) -> _Flow[bool]:
        ranks, pins = yield from self._read()
        yield from self._chat(ranks, [{"role": "user", "content": "."}], unpin=name)
        self._compiled.pop(name, None)
        return any(pin.name == name for pin in pins)

    def _ensure(self) -> _Flow[tuple[Receipt, ...]]:
        ranks, pins = yield from self._read()
        held = {(pin.name, pin.digest, pin.dp_rank) for pin in pins}
        compiled = []
        for name, (receipt, behind, texts) in list(self._compiled.items()):
            if any((name, receipt.digest, rank) not in held for rank in ranks):
                compiled.append((yield from self._compile(name, texts, behind)))
        return tuple(compiled)

    def _chat(self, ranks: Sequence[int | None], messages: Sequence[Message], **options: str) -> _Flow[None]:
        body = {"model": self._model, "messages": list(messages), "max_tokens": 1, "custom_params": {"pic": options}}
        for rank in ranks:
            route = {} if rank is None else {"routed_dp_rank": rank}
            yield _Call("POST", "/v1/chat/completions", {**body, **self._namespace, **route})

    def _checked(self, call: _Call, answer: httpx.Response) -> bytes:
        if answer.is_success:
            return answer.content
        is_page = "html" in answer.headers.get("content-type", "")
        said = "a web page; is this SGLang's address?" if is_page else answer.text[:1000]
        raise ServerError(f"{call.method} {self._url}{call.path}: HTTP {answer.status_code}: {said}")

    @contextmanager
    def _reaching(self, call: _Call) -> Iterator[dict[str, Any]]:
        """The arguments of httpx for a call; its errors become `ServerError`."""
        import httpx

        url = self._url + call.path
        try:
            yield {"method": call.method, "url": url, "json": call.body, "headers": self._headers}
        except httpx.HTTPError as error:
            raise ServerError(f"{call.method} {url}: {error or type(error).__name__}; is the server up?") from error


class Skills(_Client["httpx.Client"]):
    """A synchronous client that compiles texts once and pins their rows in the server's cache.

    A skill is sent after a system prompt, in the order of `compose`. Later prompts that contain the skill get its rows
    spliced, at any position. Rows in a prompt's first 32 tokens cannot be spliced, so compile the skill after the
    system prompt that it is used with. With data parallelism every rank compiles it, and drops it.

    Args:
        url: the server, as `http://127.0.0.1:30000`.
        model: the model's name, if the server checks it.
        api_key: the server's `--api-key`.
        extra_key: the namespace; the prompts that use the skills must name the same.
        cache_salt: the secret part of the namespace.
        timeout_s: most seconds of one call.
        http: an httpx client to use; this object closes it.

    Every method raises `ServerError` if the server refuses, cannot be reached or does not run sglang_pic.
    """

    @staticmethod
    def _connect(timeout_s: float) -> httpx.Client:
        import httpx

        return httpx.Client(timeout=timeout_s)

    def compile(self, name: str, text: str | Sequence[str], *, behind: str = "") -> Receipt:
        """Compile a skill and keep it under `name`; it replaces an older skill of that name.

        Args:
            name: 1 to 128 of `A-Z a-z 0-9 . _ -`.
            text: the skill. Several texts are compiled in one pass, each after the ones before it, which is closer to a
                full prefill if they are used together.
            behind: the system prompt.
        """
        return self._run(self._compile(name, text, behind))

    def list(self) -> tuple[Pin, ...]:
        """All pins in this namespace, also those of other clients; first those that would be released first."""
        return self._run(self._list())

    def drop(self, name: str) -> bool:
        """Unpin a skill, and do not compile it in `ensure` again; returns whether the server had it."""
        return self._run(self._drop(name))

    def ensure(self) -> tuple[Receipt, ...]:
        """Compile those of this object's skills again that the server lost.

        A server loses them by a restart, a flush, new weights or lack of memory.
        """
        return self._run(self._ensure())

    def close(self) -> None:
        """Close the connections; pins stay."""
        self._http.close()

    def __enter__(self) -> Skills:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _run(self, flow: _Flow[_T]) -> _T:
        try:
            call = next(flow)
            while True:
                with self._reaching(call) as request:
                    answer = self._http.request(**request)
                call = flow.send(self._checked(call, answer))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class AsyncSkills(_Client["httpx.AsyncClient"]):
    """The same as `Skills`, for asyncio."""

    @staticmethod
    def _connect(timeout_s: float) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(timeout=timeout_s)

    async def compile(self, name: str, text: str | Sequence[str], *, behind: str = "") -> Receipt:
        """As `Skills.compile`."""
        return await self._run(self._compile(name, text, behind))

    async def list(self) -> tuple[Pin, ...]:
        """As `Skills.list`."""
        return await self._run(self._list())

    async def drop(self, name: str) -> bool:
        """As `Skills.drop`."""
        return await self._run(self._drop(name))

    async def ensure(self) -> tuple[Receipt, ...]:
        """As `Skills.ensure`."""
        return await self._run(self._ensure())

    async def close(self) -> None:
        """As `Skills.close`."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncSkills:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def _run(self, flow: _Flow[_T]) -> _T:
        try:
            call = next(flow)
            while True:
                with self._reaching(call) as request:
                    answer = await self._http.request(**request)
                call = flow.send(self._checked(call, answer))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class _Pins(msgspec.Struct):
    held: list[Pin]


class _PrefixOnly(msgspec.Struct):
    reason: str


class _Plugin(msgspec.Struct):
    dp_rank: int | None = None
    pins: _Pins | None = None
    prefix_only: _PrefixOnly | None = None


class _State(msgspec.Struct):
    pic: _Plugin


class _ServerInfo(msgspec.Struct):
    internal_states: list[_State]
