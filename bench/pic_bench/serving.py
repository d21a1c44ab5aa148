"""Servers of studies: an arm of a comparison as a running server, and the calls that a study makes to it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pic_replay.client import read_events

from pic_bench.compare.arms import Arm, arm_server
from pic_bench.compare.server import POST_TIMEOUT_S, Server, request
from pic_bench.out_folder import without_secrets
from sglang_pic.errors import BenchError


class Answer(NamedTuple):
    """A server's answer to one prompt."""

    ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, spliced ones too."""
    spliced_tokens: int
    fetched_tokens: int
    """Of the spliced ones, those whose rows were on the host."""
    right_guesses: int
    """Tokens of a draft that were accepted."""
    first: dict[str, float]
    """Log probabilities of the 20 likeliest first tokens, by id; none where they were not asked for."""


class FirstToken(NamedTuple):
    """The first token of a stream."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int


@contextmanager
def serving(model: str, arm: Arm, logs: Path, **settings: Any) -> Iterator[Server]:
    """`arm_server`, started, watched until the block ends, and stopped.

    Raises:
        BenchError: the server does not start, or ends by itself.
    """
    server = arm_server(model, arm, logs / f"{time.time_ns()}-{arm.name}.log", **settings)
    print(f"starting {arm.name}: {Path(model).name} {' '.join(without_secrets(arm.server_args))}", file=sys.stderr)
    with server, server.watch():
        yield server


@contextmanager
def side_by_side(servers: Sequence[Server]) -> Iterator[None]:
    """Servers, all started at once; stopped when the block ends, or if one of them does not start.

    Raises:
        BenchError: a server does not start.
    """
    with ExitStack() as stack, ThreadPoolExecutor(len(servers)) as pool:
        for server in servers:
            stack.callback(server.stop)
        list(pool.map(Server.__enter__, servers))
        yield


def generate(
    server: Server,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 8,
    pic: Mapping[str, object] | None = None,
    with_logprobs: bool = True,
    **more: Any,
) -> Answer:
    """A greedy answer of so many tokens; `pic` are the request's options, `more` further fields of the body.

    Raises:
        BenchError: the server refused the request.
    """
    body = _greedy(prompt, max_new_tokens, pic) | more
    if with_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": 20}
    answer = server.post("/generate", body)
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        ids=answer["output_ids"],
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        spliced_tokens=details.get("pic", 0),
        fetched_tokens=details.get("pic_host", 0),
        right_guesses=meta.get("spec_num_correct_drafts", 0),
        first={str(entry[1]): entry[0] for entry in meta["output_top_logprobs"][0]} if with_logprobs else {},
    )


def events(
    url: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    pic: Mapping[str, object] | None = None,
    timeout_s: float = POST_TIMEOUT_S,
    **more: Any,
) -> Iterator[dict[str, Any]]:
    """The events of a streamed greedy answer, as they come; closed, the request is aborted. For `more` see `generate`.

    Raises:
        BenchError: the server does not answer, or answered with an error.
    """
    body = {**_greedy(prompt, max_new_tokens, pic), "stream": True, **more}
    try:
        with request(url + "/generate", body, timeout_s=timeout_s) as answer:
            for found in read_events(answer):
                if found == b"[DONE]":
                    break
                event = msgspec.json.decode(found)
                if "error" in event:
                    raise BenchError(f"{url}/generate: {event['error']}")
                yield event
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{url}/generate: {error}") from error


def first_token(url: str, prompt: Sequence[int], *, pic: Mapping[str, object] | None = None, **more: Any) -> FirstToken:
    """Send one request and time its first event; the stream is read to its end.

    Raises:
        BenchError: the server does not answer, refuses the request or ends the stream without a token.
    """
    started, elapsed, meta = time.perf_counter(), None, {}
    for event in events(url, prompt, 1, pic=pic, **more):
        elapsed = elapsed or time.perf_counter() - started
        meta = event["meta_info"]
    if elapsed is None:
        raise BenchError(f"{url}/generate: the stream ended without a token.")
    return FirstToken(elapsed, meta["prompt_tokens"], meta["cached_tokens"])


def _greedy(prompt: str | Sequence[int], max_new_tokens: int, pic: Mapping[str, object] | None) -> dict[str, object]:
    text: dict[str, object] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    options = {} if pic is None else {"custom_params": {"pic": pic}}
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **options}
    return {**text, "sampling_params": sampling}
