"""A prefill server with its decode server, and rows that were sent between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pic_bench.compare.server import free_port

from tests.e2e import pd_plugin
from tests.e2e.servers import SERVERS
from tests.e2e.serving import Answer, Client, serve

_TRANSFER = ("--disaggregation-transfer-backend", "mooncake_tcp")


class Pair(NamedTuple):
    """A prefill server, and a decode server with a radix cache of its own."""

    prefill: Client
    decode: Client
    port: int
    """Where the prefill server is asked for its rows."""
    rows: Path
    rooms: Iterator[int]

    def generate(
        self, prompt: Sequence[int], *, meanwhile: Callable[[int], None] = lambda _: None, **options: Any
    ) -> tuple[Answer, dict[str, dict[str, Any]]]:
        """What the decode server answers, and the rows of the prompt as they were `sent` and `received` last.

        `meanwhile` is called with the request's room once the prefill server has answered. SGLang's Mooncake manager
        forgets a room when its rows are sent: a decode server that asks for the room again before that waits for ever.
        """
        import torch

        room = next(self.rooms)
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(each.generate, prompt, **options, **where) for each in (self.prefill, self.decode)]
            asked[0].result()
            meanwhile(room)
            answer = asked[1].result()
        return answer, {name: torch.load(self.rows / f"{room}.{name}") for name in ("sent", "received")}


@contextmanager
def a_pair(
    name: str, model_dir: Callable[[str], Path], folder: Path, *engine: str, prefill_flags: Sequence[str] = ()
) -> Iterator[Pair]:
    """Start both servers, with the model and the settings of a shared one."""
    env, alone, port = pd_plugin.environment(folder, *engine), SERVERS[name], free_port()
    roles = {
        "prefill": ("--disaggregation-bootstrap-port", str(port), *prefill_flags),
        "decode": ("--disaggregation-decode-enable-radix-cache",),
    }

    def serve_as(role: str) -> Any:
        args = (*alone.args, *_TRANSFER, "--disaggregation-mode", role, *roles[role])
        return serve(model_dir(alone.model), folder, *args, config=alone.config, env=env)

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        prefill, decode = pool.map(stack.enter_context, map(serve_as, roles))
        yield Pair(prefill, decode, port, folder, itertools.count(1))


def assert_arrived(rows: dict[str, dict[str, Any]]) -> None:
    """Every row that the decode server has of a prompt is the prefill server's, bit for bit."""
    import torch

    for sent, received in zip(rows["sent"]["rows"], rows["received"]["rows"], strict=True):
        assert sent.abs().amax(dim=-1).gt(0).all(), "no row was left out"
        assert torch.equal(sent, received)


def torch_equal(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> bool:
    """Whether two decode servers' rows are the same."""
    import torch

    return all(map(torch.equal, one["received"]["rows"], other["received"]["rows"]))
