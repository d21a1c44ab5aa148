"""The sidecar of a proxy: names the server for a request by its text; it forwards no requests.

If a request is too large, too late or fails, the answer names no server, and the proxy chooses one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Final, Protocol

import msgspec
from aiohttp import web

from sglang_pic.route.balancer import Route
from sglang_pic.route.fleet import Fleet
from sglang_pic.route.listening import listen
from sglang_pic.route.sketch import Sketched
from sglang_pic.route.wire import Cutting
from sglang_pic.route.workers import Busy

logger = logging.getLogger(__name__)

PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/generate")
"""Requests whose prompts can be read."""

SALT_HEADER: Final = "x-pic-salt"
"""Replaces a body's `cache_salt`, as on the servers."""

MAX_BODY_BYTES: Final = 1 << 20
"""The answer to a larger request names no server."""

DEADLINE_S: Final = 0.5
"""Most time for an answer that names a server, from the request's head on."""

_POLL_S: Final = 1.0


class Sketches(Protocol):
    """The interface of `Workers`."""

    async def sketch(self, data: bytes, cutting: Cutting, salt: str | None = None) -> Sketched | None:
        """As `Prompts.sketch`."""

    def stop(self) -> None:
        """End it."""


class Sidecar:
    """Listens to servers, and answers which server to choose for a request.

    Args:
        servers: where each server publishes content events, by its address.
        salt: the secret that servers and sidecar share.
        sketches: makes sketches of prompts; stopped with this.
    """

    def __init__(self, servers: Mapping[str, str], salt: bytes, sketches: Sketches) -> None:
        self._servers, self._salt, self._sketches = servers, salt, sketches
        self.fleet = Fleet(servers)
        self._counts: Counter[str] = Counter(dict.fromkeys(_RESULTS, 0))
        self._seconds = 0.0

    def app(self) -> web.Application:
        """The HTTP application; it listens to servers while it runs."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/route", self._route)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._status)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(listen(endpoint, self._salt, partial(self._take, server)))
            for server, endpoint in self._servers.items()
        ]
        tasks.append(asyncio.create_task(self._expire()))
        yield
        for task in tasks:
            task.cancel()
        self._sketches.stop()

    async def _expire(self) -> None:
        """Remove silent servers and expired names, forever."""
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

    async def _route(self, request: web.Request) -> web.Response:
        begun, route = time.monotonic(), None
        try:
            async with asyncio.timeout(DEADLINE_S):
                route, result = await self._choose(request)
        except web.HTTPRequestEntityTooLarge:
            result = "too_large"
        except TimeoutError:
            result = "too_late"
        except Busy:
            result = "busy"
        except Exception:
            logger.warning("a request could not be read", exc_info=True)
            result = "fault"
        self._counts[result] += 1
        self._seconds += time.monotonic() - begun
        answer: dict[str, str | int | None] = {"server": None}
        if route is not None:
            answer = {"server": route.server, "computed_tokens": route.num_computed}
        response = web.json_response(answer)
        if result in ("too_large", "too_late"):
            # The rest of the body is not read.
            response.force_close()
        return response

    async def _choose(self, request: web.Request) -> tuple[Route | None, str]:
        """The route of a request, and the result to count."""
        if request.query.get("path", PATHS[0]) not in PATHS:
            return None, "not_by_text"
        if (request.content_length or 0) > MAX_BODY_BYTES:
            return None, "too_large"
        body = await request.read()
        cutting = self.fleet.cutting
        if cutting is None:
            return None, "no_server"
        sketched = await self._sketches.sketch(body, cutting, request.headers.get(SALT_HEADER))
        if sketched is None:
            return None, "not_by_text"
        # NOTE: a message of a server may have changed the cutting meanwhile; the names depend on it.
        route = self.fleet.route(sketched, time.monotonic()) if cutting == self.fleet.cutting else None
        return route, "no_server" if route is None else "named"

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _status(self, _: web.Request) -> web.Response:
        servers = msgspec.to_builtins(self.fleet.status(time.monotonic()))
        return web.json_response({"servers": servers, "requests": dict(self._counts)})

    async def _metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format."""
        lines = ["# TYPE sglang:pic_route_requests_total counter"]
        lines += [f'sglang:pic_route_requests_total{{result="{name}"}} {n}' for name, n in self._counts.items()]
        lines += [
            "# TYPE sglang:pic_route_seconds_total counter",
            f"sglang:pic_route_seconds_total {self._seconds:.6f}",
        ]
        status = self.fleet.status(time.monotonic())
        for field, kind in _SERVER_METRICS.items():
            name = f"sglang:pic_route_server_{kind[0]}"
            lines.append(f"# TYPE {name} {kind[1]}")
            lines += [f'{name}{{server="{server}"}} {int(getattr(each, field))}' for server, each in status.items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain", charset="utf-8")


_RESULTS: Final = ("named", "not_by_text", "no_server", "too_large", "too_late", "busy", "fault")
_SERVER_METRICS: Final = {
    "is_there": ("up", "gauge"),
    "num_names": ("names", "gauge"),
    "waiting_tokens": ("waiting_tokens", "gauge"),
    "num_messages": ("messages_total", "counter"),
    "num_bytes": ("bytes_total", "counter"),
    "num_gaps": ("gaps_total", "counter"),
}
