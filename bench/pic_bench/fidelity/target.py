"""The server under test: requests with the test options, and the server's records of them.

The server completes a file before it answers; it is deleted once it was read.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pic_bench.compare.arms import build_arms
from pic_bench.compare.server import Server
from pic_bench.fidelity.arms import Arm
from pic_bench.serving import Answer, arm_server, generate
from sglang_pic.errors import BenchError

_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded request."""

    logits: npt.NDArray[np.float32]
    """`[positions, vocab]`, from the last token of the prompt on."""
    prefix_hit_tokens: int
    chunk_hit_tokens: int


class Unrecorded(BenchError):
    """A request was answered, but not all of its logits were written down."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message)
        self.answer = answer


@dataclass
class Target:
    """Calls a server that takes the test options."""

    server: Server
    record_dir: Path

    def serve(self, tokens: Sequence[int], arm: Arm, *, key: str) -> None:
        """Serve tokens under an arm, on its own cache, with nothing recorded."""
        self._generate(tokens, key, _options(arm))

    def flush(self) -> None:
        """Forget every cached row."""
        self.server.post("/flush_cache", {})

    def record(self, prompt: Sequence[int], gold: Sequence[int], arm: Arm, *, key: str) -> Recorded:
        """Serve a prompt with gold tokens behind it, which are computed, and read what was recorded.

        Raises:
            Unrecorded: it recorded nothing, or less than was asked for.
            BenchError: it refused the request.
        """
        name = f"r{time.monotonic_ns()}"
        options = _options(arm)
        options["testing"] = {**options["testing"], "record": name}
        # Tokens whose log probabilities are requested are computed.
        asked = {"return_logprob": True, "logprob_start_len": len(prompt) - 1}
        served = self._generate([*prompt, *gold], key, options, **asked)
        path = self.record_dir / f"{name}.npz"
        try:
            with np.load(path) as file:
                logits = file["logits"]
        except FileNotFoundError as error:
            said = "the server recorded nothing: the request shared its batch, or came in chunks."
            raise Unrecorded(said, served) from error
        path.unlink()
        if len(logits) != len(gold) + 1:
            raise Unrecorded(
                f"the server recorded {len(logits)} positions of {len(gold) + 1}: prefill a prompt in one "
                "pass (--chunked-prefill-size -1).",
                served,
            )
        return Recorded(
            logits=logits,
            prefix_hit_tokens=served.cached_tokens - served.spliced_tokens,
            chunk_hit_tokens=served.spliced_tokens,
        )

    def greedy(self, prompt: Sequence[int], num_tokens: int, *, key: str) -> list[int]:
        """Generate after a full prefill in a namespace."""
        return self._generate(prompt, key, {"mode": "off", "testing": {}}, num_tokens).ids

    def _generate(
        self, tokens: Sequence[int], key: str, pic: dict[str, Any], num_tokens: int = 1, **more: object
    ) -> Answer:
        try:
            return generate(
                self.server, tokens, max_new_tokens=num_tokens, pic=pic, with_logprobs=False, extra_key=key, **more
            )
        except OSError as error:
            self.server.check_alive(grace_s=2.0)
            raise BenchError(f"{self.server.base_url} did not answer: {error}. Log: {self.server.log_path}") from error


def _options(arm: Arm) -> dict[str, Any]:
    if arm.is_control:
        return {"mode": "off", "testing": {}}
    return {"testing": {"policy": arm.overrides, "rotate": arm.rotate, "flip_donors": arm.flip}}


@contextmanager
def serve_target(
    model: str,
    *,
    dtype: str,
    pool_tokens: int,
    server_args: Sequence[str],
    log_path: Path,
    start_timeout_s: float,
    certificate: Path | None = None,
) -> Iterator[Target]:
    """A patched server that splices and records what a request asks for, stopped when the block ends.

    Args:
        certificate: named to the server, so that it says what a certificate is compared with; it need not exist.
    """
    flags = ["--dtype", dtype, "--max-total-tokens", str(pool_tokens), "--chunked-prefill-size", "-1", *server_args]
    config: dict[str, object] = {"cost_gate": "off", "self_test": "off", "audit_rate": 0.0}
    if certificate is not None:
        config["certificate"] = str(certificate.resolve())
    (arm,) = build_arms(["pic"], server_args=(), pic_config=json.dumps(config))
    with tempfile.TemporaryDirectory(prefix="pic-fidelity-", dir=_SHM if _SHM.is_dir() else None) as folder:
        probe = {"request_options": True, "record_dir": folder}
        server = arm_server(model, arm, log_path, flags=flags, probe=probe, start_timeout_s=start_timeout_s)
        with server, server.watch():
            yield Target(server, Path(folder))
