"""A server that already runs: the same passes, sent while it serves nobody, each in a namespace of its own.

The cache is not flushed, for it serves others too: a pass that begins has a new namespace, and what it leaves is
evicted as everything else is.

The server must take test options and write logits to a folder of this machine. The likeliest tokens that any server
returns are not enough: KL over these and the rest is at most KL over the vocabulary, not at least.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pic_bench.compare.server import Server
from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.target import Recorded, Target, Unrecorded
from pic_bench.probe_plugin import PROBE_VARIABLE
from pic_bench.probe_plugin.options import ProbeReport
from pic_bench.serving import Answer
from sglang_pic.certificate import Served
from sglang_pic.config import CONFIG_VARIABLE
from sglang_pic.errors import BenchError

_POLL_S = 0.1
_TRIES = 8


def attach(url: str, model: str, *, until: float) -> Target:
    """The server at a URL.

    Args:
        until: on the monotonic clock, how long its requests are waited for.

    Raises:
        BenchError: it does not answer, serves another model or several replicas, or was not started for this.
    """
    server = _Running(url)
    probe, here = _read(server)
    if here.model != Path(model).name:
        raise BenchError(f"{url} serves {here.model!r}, not {Path(model).name!r}, as --model says.")
    folder = probe.switches.record_dir
    if not probe.switches.request_options or folder is None or not Path(folder).is_dir():
        raise BenchError(f"{url} writes no logits to a folder of this machine; {_HOW}.")
    return _RunningTarget(server, Path(folder), until)


_HOW = (
    f'start it with {PROBE_VARIABLE}=\'{{"request_options": true, "record_dir": "FOLDER"}}\' and with "certificate" in '
    f"{CONFIG_VARIABLE}, a file that need not exist"
)


def _read(server: Server) -> tuple[ProbeReport, Served]:
    """What its part of `/server_info` says: its test switches, and what a certificate is compared with."""
    try:
        states = msgspec.json.decode(server.get("/server_info"))["internal_states"]
        parts = [state["pic"] for state in states]
        found = [(msgspec.convert(pic["probe"], ProbeReport), pic["certificate"]["here"]) for pic in parts]
    except OSError as error:
        raise BenchError(f"{server.base_url} does not answer: {error}") from error
    except (KeyError, TypeError, msgspec.MsgspecError) as error:
        raise BenchError(f"{server.base_url} was not started for this; {_HOW}.") from error
    if len(found) != 1:
        raise BenchError(f"{server.base_url} has {len(found)} replicas with a cache each; give one.")
    return found[0][0], msgspec.convert(found[0][1], Served)


class _Running(Server):
    """A server that nobody here starts or ends."""

    def __init__(self, url: str) -> None:
        super().__init__((), port=0, log_path=Path("the server's own"))
        self._url = url.rstrip("/")

    @property
    def base_url(self) -> str:
        return self._url


class _RunningTarget(Target):
    """Calls it while it is idle."""

    def __init__(self, server: Server, record_dir: Path, until: float) -> None:
        super().__init__(server, record_dir)
        self._until, self._scope = until, ""
        self.flush()

    def flush(self) -> None:
        """Leave what was computed so far behind."""
        self._scope = f"tune-{secrets.token_hex(8)}"

    def record(self, prompt: Sequence[int], gold: Sequence[int], arm: Arm, *, key: str) -> Recorded:
        """As `Target.record`; again where a user's request shared the pass, or it came in chunks.

        The rows of the first time are served then, and what is recorded was computed behind them, as it was before.
        """
        first: Answer | None = None
        for attempt in range(1, _TRIES + 1):
            try:
                found = super().record(prompt, gold, arm, key=key)
            except Unrecorded as error:
                if attempt == _TRIES:
                    raise
                first = first or error.answer
                continue
            if first is None:
                return found
            prefix = first.cached_tokens - first.spliced_tokens
            return replace(found, prefix_hit_tokens=prefix, chunk_hit_tokens=first.spliced_tokens)
        raise AssertionError("the last try returns or raises")

    def _generate(
        self, tokens: Sequence[int], key: str, pic: dict[str, Any], num_tokens: int = 1, **more: object
    ) -> Answer:
        while not _read(self.server)[0].is_idle:
            if time.monotonic() >= self._until:
                raise BenchError(f"{self.server.base_url} had requests of its own until the time limit.")
            time.sleep(_POLL_S)
        return super()._generate(tokens, f"{self._scope}/{key}", pic, num_tokens, **more)
