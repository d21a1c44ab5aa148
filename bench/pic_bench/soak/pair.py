"""A prefill server and its decode server (PD disaggregation), as one server to those who send requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Any, TypeVar

from pic_bench.compare.server import POST_TIMEOUT_S, Server, free_port

T = TypeVar("T")


@dataclass(eq=False)
class Pair(Server):
    """The prefill server; what is posted to it reaches the decode server too, which answers."""

    _: KW_ONLY
    decode: Server
    bootstrap_port: int
    """Where the decode server asks for rows."""
    _rooms: count[int] = field(default_factory=lambda: count(1), init=False)

    def check_alive(self, grace_s: float = 0.0) -> None:
        """As of one server, for both."""
        super().check_alive(grace_s)
        self.decode.check_alive(grace_s)

    def post(self, path: str, body: Any, timeout_s: float = POST_TIMEOUT_S) -> Any:
        """As of one server, by both."""
        return self.on_both(lambda server, sent: Server.post(server, path, sent, timeout_s), body)

    def on_both(self, call: Callable[[Server, Any], T], body: Any) -> T:
        """What `call` returns for the decode server; both are called at once, and a prompt in `body` has one room.

        Raises:
            Exception: that of the call to the decode server, or else of the other one.
        """
        if "input_ids" in body:
            here = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port}
            body = {**body, **here, "bootstrap_room": next(self._rooms)}
        with ThreadPoolExecutor(2) as pool:
            prefill, decode = (pool.submit(call, server, body) for server in (self, self.decode))
        answer = decode.result()
        prefill.result()
        return answer


def pair_of(prefill: Server, decode: Server) -> Pair:
    """Both, not yet started, of a prefill server that has no port for its rows yet."""
    port = free_port()
    command = [*prefill.command, "--disaggregation-bootstrap-port", str(port)]
    return Pair(
        command, port=prefill.port, log_path=prefill.log_path, env=prefill.env, decode=decode, bootstrap_port=port
    )
