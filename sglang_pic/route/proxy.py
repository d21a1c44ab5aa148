"""The sidecar in front of the gateway: an ASGI program that says where a request goes and hands it on.

It carries a request to the gateway, which chooses a server, retries and balances as it always does; our header names
the choice. Whatever fails here sends the request without that header.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path

from sglang_pic.route.fleet import Fleet
from sglang_pic.route.listening import listen
from sglang_pic.route.policy import Route
from sglang_pic.route.prompts import Prompts
from sglang_pic.route.sketch import Sketched

logger = logging.getLogger(__name__)

KEY_HEADER: Final = "x-smg-routing-key"
"""The gateway sends requests with one key to one server, as long as it is well."""

WORKER_HEADER: Final = "x-smg-routed-worker-id"
"""In a response: the server that the gateway chose."""

_STEERED: Final = ("/v1/chat/completions", "/v1/completions", "/generate")
_CHOSEN: Final = (KEY_HEADER, "x-smg-target-worker")
_HOP: Final = {"connection", "content-length", "host", "keep-alive", "trailer", "transfer-encoding", "upgrade"}
_GONE: Final = _HOP - {"content-length"}
_CLIENT_LEFT: Final = 499  # nobody reads it
_TAIL_BYTES: Final = 8192
_USAGE: Final = re.compile(rb'"(prompt_tokens|cached_tokens)"\s*:\s*(\d+)')
_POLL_S: Final = 1.0
# Names of text that steered requests brought lately, where the gateway does not say which server answers.
_MAX_AWAITED: Final = 20_000


class Keys:
    """Which routing key reaches which server: at most one for each path and server.

    A gateway says in its answer which server it chose, or is found out: the server that tells new text soon after a
    request with that text is the one that its key reached. A wrong guess costs hits and is mended by the next text.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}
        # By name of a chunk, the path and key of the request that brought it; None where several did.
        self._awaited: OrderedDict[int, tuple[str, str] | None] = OrderedDict()

    def get(self, path: str, server: str) -> str | None:
        """A key that reached the server last time."""
        return self._known.get((path, server))

    def learn(self, path: str, key: str, server: str) -> None:
        """A request with the key was answered by a server."""
        self._known = {
            (of, other): known
            for (of, other), known in self._known.items()
            if of != path or (other != server and known != key)
        }
        self._known[path, server] = key

    def expect(self, path: str, key: str, names: Iterable[int]) -> None:
        """A request with the key has text of these names, and nobody said which server answers."""
        for name in names:
            is_new = self._awaited.pop(name, (path, key)) == (path, key)
            self._awaited[name] = (path, key) if is_new else None
        while len(self._awaited) > _MAX_AWAITED:
            self._awaited.popitem(last=False)

    def told(self, server: str, names: Iterable[int]) -> None:
        """A server told these names, which it had not before."""
        for found in {self._awaited.pop(name, None) for name in names}:
            if found is not None:
                self.learn(*found, server)


class Router:
    """Chooses servers and forwards requests.

    Args:
        gateway: its address.
        servers: where each server publishes content events, by the address that the gateway has of it.
        prompts: makes sketches.
    """

    def __init__(self, gateway: str, servers: Mapping[str, str], prompts: Prompts) -> None:
        self._gateway, self._servers, self._prompts = gateway.rstrip("/"), servers, prompts
        self._keys = Keys()
        self.fleet = Fleet(servers, self._keys.told)
        self._counts: Counter[str] = Counter()
        # Of requests that reached the server that was chosen: what it was thought to compute, and what it did.
        self._tokens: Counter[str] = Counter()
        # One thread: the tokenizer's cache is not safe for more, and the loop goes on with other requests meanwhile.
        self._sketching = ThreadPoolExecutor(1, thread_name_prefix="sketch")
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10), limits=httpx.Limits(max_connections=None), trust_env=False
        )

    def app(self) -> Starlette:
        """The ASGI program."""
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
        return Starlette(
            routes=[
                Path("/route", self._say, methods=["POST"]),
                Path("/status", self._status, methods=["GET"]),
                *(Path(path, self._steer, methods=["POST"]) for path in _STEERED),
                Path("/{path:path}", self._pass_on, methods=methods),
            ],
            lifespan=self._running,
        )

    @asynccontextmanager
    async def _running(self, _: Starlette) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(listen(endpoint, self._prompts.salt, partial(self._take, server)))
            for server, endpoint in self._servers.items()
        ]
        tasks.append(asyncio.create_task(self._expire()))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._client.aclose)
            stack.callback(self._sketching.shutdown, wait=False)
            for task in tasks:
                stack.callback(task.cancel)
            yield

    async def _expire(self) -> None:
        """Leave out servers and text that were not heard of, for ever."""
        while True:
            await asyncio.sleep(_POLL_S)
            self.fleet.leave_silent(time.monotonic())
            self.fleet.expire(time.monotonic())

    def _take(self, server: str, data: bytes) -> bool:
        try:
            return self.fleet.take(server, data, time.monotonic())
        except Exception:
            logger.warning("%s: a message could not be taken", server, exc_info=True)
            return False

    async def _choose(self, body: bytes) -> tuple[Route, Sketched] | None:
        """Where a request goes; None leaves it to the gateway."""
        if self.fleet.cutting is None:
            self._counts["no_server"] += 1
            return None
        try:
            loop = asyncio.get_running_loop()
            sketched = await loop.run_in_executor(self._sketching, self._prompts.sketch, body, self.fleet.cutting)
            if sketched is None:
                self._counts["not_routed_by_text"] += 1
                return None
            route = self.fleet.route(sketched)
        except Exception:
            logger.warning("a request goes to the gateway as it came", exc_info=True)
            self._counts["fault"] += 1
            return None
        self._counts["steered"] += route is not None
        return None if route is None else (route, sketched)

    async def _steer(self, request: Request) -> Response:
        body = await request.body()
        is_chosen = any(name in request.headers for name in _CHOSEN)
        chosen = None if is_chosen else await self._choose(body)
        if chosen is None:
            return await self._forward(request, body)
        route, sketched = chosen
        path, server = request.url.path, str(route.server)
        known = self._keys.get(path, server)
        if known is not None:
            self.fleet.assume(server, sketched.names, time.monotonic())
        key = known or secrets.token_hex(8)
        return await self._forward(request, body, _Steered(self, route, path, key, sketched))

    async def _pass_on(self, request: Request) -> Response:
        return await self._forward(request, await request.body())

    async def _forward(self, request: Request, body: bytes, steered: _Steered | None = None) -> Response:
        """The gateway's answer, as it comes; asked again without our header where it could not serve the request."""
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        extra = [] if steered is None else [(KEY_HEADER, steered.key)]
        url = httpx.URL(self._gateway + request.url.path, query=request.url.query.encode())
        asked = self._client.build_request(request.method, url, headers=headers + extra, content=body)
        answer, failure = None, ""
        try:
            answer = await _while_wanted(request, self._client.send(asked, stream=True))
        except httpx.TransportError as error:
            failure = str(error) or type(error).__name__
        except BaseException as error:
            if steered is not None:
                steered.end()
            if isinstance(error, ClientDisconnect):
                return Response(status_code=_CLIENT_LEFT)
            raise
        if steered is not None and (answer is None or answer.status_code >= 500):
            self._counts["sent_again"] += 1
            if answer is not None:
                await answer.aclose()
            steered.end()
            return await self._forward(request, body)
        if answer is None:
            return JSONResponse({"error": {"message": f"{self._gateway}: {failure}", "code": 502}}, 502)
        if steered is not None:
            steered.answered_by(answer.headers.get(WORKER_HEADER))
        response = _Relayed(answer, steered)
        response.raw_headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.decode("latin-1").lower() not in _GONE
        ]
        return response

    def answered_by(self, steered: _Steered, named: str | None) -> str | None:
        """The server that answers a steered request, if the gateway names one that is known here; noted either way."""
        server = (named or "").rstrip("/")
        if server not in self._servers:
            self._counts["unnamed"] += 1
            self._keys.expect(steered.path, steered.key, steered.names.tolist())
            return None
        self._keys.learn(steered.path, steered.key, server)
        self.fleet.assume(server, steered.names, time.monotonic())
        return server

    def ended(self, route: Route, computed: int | None, *, is_elsewhere: bool) -> None:
        """A steered request has ended; its server, or another one, computed so many tokens, if it said."""
        self.fleet.balancer.end(route, 0 if is_elsewhere else computed)
        self._counts["elsewhere"] += is_elsewhere
        if computed and not is_elsewhere:
            self._tokens["estimated"] += route.num_computed
            self._tokens["computed"] += computed

    async def _say(self, request: Request) -> Response:
        """Where a request would go, for programs that set headers themselves."""
        path = request.query_params.get("path", _STEERED[0])
        chosen = await self._choose(await request.body())
        if chosen is None:
            return JSONResponse({"server": None, "headers": {}})
        route, _ = chosen
        self.fleet.balancer.end(route)
        server = str(route.server)
        key = self._keys.get(path, server)
        headers = {} if key is None else {KEY_HEADER: key}
        return JSONResponse({"server": server, "headers": headers, "computed_tokens": route.num_computed})

    async def _status(self, _: Request) -> Response:
        servers = {server: msgspec.to_builtins(each) for server, each in self.fleet.status().items()}
        index_bytes = self.fleet.balancer.index.num_bytes
        counts = {"requests": dict(self._counts), "tokens": dict(self._tokens)}
        return JSONResponse({"servers": servers, **counts, "index_bytes": index_bytes})


class _Steered:
    """A request that was given a key, until it has ended."""

    def __init__(self, router: Router, route: Route, path: str, key: str, sketched: Sketched) -> None:
        self._router, self._route, self.path, self.key = router, route, path, key
        self.names = sketched.names
        self.tail = b""
        """The last bytes of the answer."""
        self._is_elsewhere = False

    def answered_by(self, named: str | None) -> None:
        """The gateway answers, and may name the server."""
        server = self._router.answered_by(self, named)
        self._is_elsewhere = server not in (None, self._route.server)

    def end(self) -> None:
        """The request has ended, whatever came of it."""
        usage = {name: int(number) for name, number in _USAGE.findall(self.tail)}
        computed = usage.get(b"prompt_tokens", 0) - usage.get(b"cached_tokens", 0) if len(usage) == 2 else None
        self._router.ended(self._route, computed, is_elsewhere=self._is_elsewhere)


async def _while_wanted(request: Request, sending: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The gateway's answer; given up where the client goes away, so that the server aborts the request.

    Raises:
        ClientDisconnect: it went away.
    """

    async def leaves() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(_POLL_S)

    answer, left = asyncio.ensure_future(sending), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        left.cancel()


class _Relayed(StreamingResponse):
    """The gateway's answer as it comes; the request has ended when it was sent, or when the client left."""

    def __init__(self, answer: httpx.Response, steered: _Steered | None) -> None:
        super().__init__(self._parts(), answer.status_code)
        self._answer, self._steered = answer, steered

    async def __call__(self, *asgi: Any) -> None:
        try:
            await super().__call__(*asgi)
        finally:
            if self._steered is not None:
                self._steered.end()
            await self._answer.aclose()

    async def _parts(self) -> AsyncIterator[bytes]:
        async for part in self._answer.aiter_raw():
            if self._steered is not None:
                self._steered.tail = (self._steered.tail + part)[-_TAIL_BYTES:]
            yield part
