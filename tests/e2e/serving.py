"""A real server under test, and the few calls the tests make to it."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import pytest
from pic_bench.compare.server import Server, free_port, launch_command
from pic_bench.probe_plugin import PROBE_VARIABLE
from PIL import Image

from sglang_pic.config import CONFIG_VARIABLE
from sglang_pic.core import MOST_REUSE
from tests.e2e import plugins

# A pool that holds what the tests send several times over, and no more. SGLang's own request before the first one
# warms caches that no test measures; servers of the commands under test send theirs.
_COMMON_ARGS = (
    *("--device", "cpu", "--enable-cache-report", "--enable-metrics", "--max-total-tokens", "24000"),
    "--skip-server-warmup",
)
# What takes longer hangs. A test has more time than both, so that it says what it waited for: `TEST_LIMIT_S`.
_WAIT_LIMIT_S, _START_LIMIT_S = 300.0, 600.0
TEST_LIMIT_S = 1200.0
"""pytest's limit for a test with a server."""
# An answer of that many tokens has not ended when it is aborted.
_ENDLESS = 4000


class Answer(NamedTuple):
    """What a generation returned."""

    text: str
    ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    chunk_hit_tokens: int
    behind_change_tokens: int
    guarded_tokens: int
    inherited_tokens: int
    fetched_tokens: int
    """Of the chunk hits, those whose rows were on the host."""
    right_guesses: int
    """Tokens of a draft that were accepted."""
    first_token: dict[int, float]
    """Log-probabilities of the first token's top 20."""
    input_logprobs: list[float]
    """Log-probabilities of the prompt's tokens, from where they were asked for."""


class Client:
    """Calls one server; of several ranks that serve requests of their own, the one that it is for."""

    def __init__(self, server: Server, dp_rank: int | None = None) -> None:
        self.server, self.dp_rank = server, dp_rank

    def on_rank(self, dp_rank: int) -> Client:
        return Client(self.server, dp_rank)

    @property
    def route(self) -> dict[str, int]:
        """What a request says to reach the rank."""
        return {} if self.dp_rank is None else {"routed_dp_rank": self.dp_rank}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of the server; raises `BenchError` on an error status, `OSError` where none comes in time."""
        return self.server.post(path, body, _WAIT_LIMIT_S)

    def generate(
        self,
        prompt: Sequence[int] | str,
        *,
        pic: object = None,
        fault: str | None = None,
        max_new_tokens: int = 8,
        **body: Any,
    ) -> Answer:
        """Greedy text after token ids or a text, with the first token's distribution; `fault` is one of `STAGES`."""
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        asked = {"sampling_params": greedy(max_new_tokens, pic=pic, fault=fault), "return_logprob": True}
        return self.answer(self.post("/generate", {**given, **asked, "top_logprobs_num": 20, **self.route, **body}))

    @staticmethod
    def answer(result: Any) -> Answer:
        """What SGLang's answer to one prompt says."""
        meta = result["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            text=result["text"],
            ids=[entry[1] for entry in meta["output_token_logprobs"]],
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            chunk_hit_tokens=details.get("pic", 0),
            behind_change_tokens=details.get("pic_behind_change", 0),
            guarded_tokens=details.get("pic_guarded", 0),
            inherited_tokens=details.get("pic_inherited", 0),
            fetched_tokens=details.get("pic_host", 0),
            right_guesses=meta.get("spec_num_correct_drafts", 0),
            first_token={entry[1]: entry[0] for entry in meta["output_top_logprobs"][0]},
            input_logprobs=[entry[0] for entry in meta.get("input_token_logprobs") or [] if entry[0] is not None],
        )

    def generate_all(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """The prompts at once, so that the scheduler forms mixed batches."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    @contextmanager
    def running(self, prompt: Sequence[int]) -> Iterator[None]:
        """A request decodes while the block runs: its prompt is computed before, and it is aborted afterwards."""
        rid, before = f"running-{time.monotonic_ns()}", self.counters()
        body = {"input_ids": list(prompt), "rid": rid, "sampling_params": greedy(_ENDLESS), **self.route}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.post, "/generate", body)
            try:
                wait_until(lambda: self.grown(before)["prompt_tokens"] >= len(prompt))
                yield
            finally:
                self.post("/abort_request", {"rid": rid})
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort", "it ended before the block"

    def counters(self) -> dict[str, float]:
        """Our counters, `name{label}` for the labelled ones."""
        found = {}
        for line in self.server.get("/metrics").splitlines():
            match = re.match(r"sglang:pic_(\w+?)(?:_total)?\{(.*)\} (\S+)$", line)
            of_rank = self.dp_rank is None or f'dp_rank="{self.dp_rank}"' in line
            if match and of_rank and not match[1].endswith("_created"):
                label = re.search(r'(?:source|reason|context|nonce|event)="([\w-]+)"', match[2])
                found[f"{match[1]}:{label[1]}" if label else match[1]] = float(match[3])
        return found

    def grown(self, before: Mapping[str, float]) -> dict[str, float]:
        """What `counters` has counted since it said `before`."""
        return {name: value - before.get(name, 0.0) for name, value in self.counters().items()}

    def internal_state(self) -> dict[str, Any]:
        """The plugin's part of `/server_info`."""
        states = [state["pic"] for state in json.loads(self.server.get("/server_info"))["internal_states"]]
        (state, *_) = [state for state in states if state.get("dp_rank") == self.dp_rank]
        return state

    def audit(self) -> dict[str, Any]:
        """The audit's part of that, once nothing waits to be audited."""
        wait_until(lambda: self.internal_state()["audit"]["num_pending"] == 0)
        audit: dict[str, Any] = self.internal_state()["audit"]
        return audit

    def flush(self) -> None:
        """Forget every cached row, once the server is idle."""
        self.post("/flush_cache?timeout=60", {})

    def log(self) -> str:
        return self.server.log_path.read_text(errors="replace")

    def faults(self) -> str:
        """What the server has logged from its first traceback or leak on, if there is any."""
        log = _PORT_NOT_OPEN_YET.sub("", self.log())
        found = re.search("Traceback|leak", log, re.IGNORECASE)
        return log[found.start() :] if found else ""


# Without a warm-up SGLang asks its own port to freeze the garbage collector, at times before the port is open.
_PORT_NOT_OPEN_YET = re.compile(r"post-warmup freeze_gc failed\n.*?(?=^\[\d{4}-)", re.DOTALL | re.MULTILINE)
_CORE = msgspec.structs.asdict(MOST_REUSE)


@contextmanager
def serve(
    model: Path,
    log_dir: Path,
    *args: str,
    backend: str | None = "pic",
    config: dict[str, Any] | None = None,
    probe: dict[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    injected: Collection[str] = (),
) -> Iterator[Client]:
    """A server of `model`, patched unless `backend` is None, until the block ends.

    The server runs no self-test unless `config` asks for one, because the self-test takes seconds. Of each run it
    computes one token, and nothing more near the prompt's end, because the prompts of the tests are short.
    `probe` switches on what only experiments need, `env` is what `plugins.environment` made for the server. A server
    that caught an exception of ours fails the test at its end, unless a test injected it.
    """
    config = config or {}
    config = {"self_test": "off", **config, "core": {**_CORE, **config.get("core", {})}}
    port = free_port()
    backend_args = ("--radix-cache-backend", backend) if backend else ()
    server = Server(
        launch_command(str(model), port, [*_COMMON_ARGS, *backend_args, *args]),
        port=port,
        log_path=log_dir / f"server-{port}.log",
        env={
            CONFIG_VARIABLE: json.dumps(config),
            PROBE_VARIABLE: None if probe is None else json.dumps(probe),
            **(plugins.environment() if env is None else env),
        },
        start_timeout_s=_START_LIMIT_S,
    )
    with server, pytest.MonkeyPatch.context() as patch:
        client = Client(server, 0 if {"--dp-size", "--attn-dp-size"} & {*args} else None)
        yield client
        server.check_alive()
        assert set(re.findall(r"\((fault_\w+)\) No answer", client.log())) <= {*injected}, client.faults()
        # SGLang looks every five seconds whether it was told to end: what is left to see is in the log by now.
        patch.setattr("pic_bench.compare.server.TERM_GRACE_S", 0.0)
        server.stop()


@contextmanager
def killed_once_it_records(folder: Path, records: str, process: str) -> Iterator[None]:
    """Of this process's descendants the one with `process` on its command line is killed.

    It ends when a file named `records` below `folder` has content; its children are left to whoever started it.
    """
    killed: list[psutil.Process] = []

    def kill() -> None:
        while not any(path.stat().st_size for path in folder.rglob(records)):
            time.sleep(0.05)
        killed.extend(child for child, command in _descendants() if process in command)
        for child in killed:
            child.kill()

    Thread(target=kill, daemon=True).start()
    yield
    assert len(killed) == 1


def assert_nothing_runs(error: str) -> None:
    """A command that said `error` has ended its servers, and shows a traceback in a server's log at most."""
    assert "Traceback" not in error.split("its last lines:", maxsplit=1)[0]
    assert not any("sglang::" in command for _, command in _descendants())


def _descendants() -> list[tuple[psutil.Process, str]]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            found.append((child, " ".join(child.cmdline())))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition` holds; fail where it never does."""
    deadline = time.monotonic() + _WAIT_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not after {_WAIT_LIMIT_S} s: {condition}"
        time.sleep(0.05)


def greedy(max_new_tokens: int, **custom_params: object) -> dict[str, Any]:
    """Sampling parameters of a greedy answer of that many tokens, with the `custom_params` that are not `None`."""
    given = {name: value for name, value in custom_params.items() if value is not None}
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return sampling | ({"custom_params": given} if given else {})


def entries(num: int, between: str = " ") -> str:
    """A text of so many entries, about 20 tokens each."""
    return between.join(f"Entry {i} lists {i * 7 % 31} bars of copper and {i * 13 % 17} of tin." for i in range(num))


def random_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(count)]


def leave_for_the_host(client: Client) -> None:
    """Compute other text until none of what was there before is on the device."""
    pool = json.loads(client.server.get("/server_info"))["max_total_tokens"]
    for number in range(-(-pool // 600) + 1):
        client.generate(random_tokens(100 + number, 600), max_new_tokens=1)


def assert_same(one: Answer, other: Answer) -> None:
    """The same tokens and, in float32, the same distribution of the first one."""
    assert other.ids == one.ids
    assert divergence(one.first_token, other.first_token) <= 1e-5


def divergence(reference: dict[int, float], other: dict[int, float]) -> float:
    """KL of the first token over the reference's top 20; a token that `other` lacks counts with `other`'s smallest."""
    floor = min(other.values())
    return sum(math.exp(p) * (p - other.get(token, floor)) for token, p in reference.items())


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def image(seed: int, width: int, height: int) -> str:
    """An image of noise, of so many pixels; 28 x 28 of them are a token."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream := io.BytesIO(), "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def words(client: Client, seed: int, count: int) -> str:
    """Text of about so many tokens."""
    return str(client.post("/detokenize", {"tokens": random_tokens(seed, count)})["text"])


A, B, C = image(1, 280, 196), image(2, 196, 280), image(3, 140, 336)
_NUM_TOKENS = 32


class Served(NamedTuple):
    """An answer, and how the draft did."""

    ids: list[int]
    num_spliced: int
    num_fetched: int
    """Of these, those whose rows were on the host."""
    num_right: int
    """Tokens of the draft that were accepted."""
    num_rounds: int


def ask(client: Client, prompt: Sequence[int] | str, *, mode: str = "auto", images: Sequence[str] = ()) -> Served:
    given: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    given |= {"image_data": images} if images else {}
    body = {**given, "sampling_params": greedy(_NUM_TOKENS, pic={"mode": mode})}
    answer = client.post("/generate", {**body, **client.route})
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    right, rounds = meta["spec_num_correct_drafts"], meta["spec_verify_ct"]
    return Served(answer["output_ids"], details.get("pic", 0), details.get("pic_host", 0), right, rounds)
