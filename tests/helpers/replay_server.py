"""A small fake of the server's HTTP side, and the replay's command against it."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pic_replay
import pic_traces
import pytest
from pic_replay import ReplayOptions, run_replay
from pic_replay.records import RequestRecord

import sglang_pic

PACKAGE_ROOTS = os.pathsep.join(str(Path(p.__path__[0]).parent) for p in (pic_replay, pic_traces, sglang_pic))
ENV = {**os.environ, "PYTHONPATH": PACKAGE_ROOTS}
PREFILL_S = 0.15
DECODE_S = 0.05


@dataclass
class FakeServer:
    """Counts a word as a token and reports half of a prompt as prefix hit and a quarter as chunk hit.

    Words in a prompt steer it: `FAIL` gives HTTP 500, `BREAK` cuts the stream, `HANG` waits for `release`, `ABORT` ends
    as a request that somebody aborted, `CALL` calls a tool with the prompt as its argument.
    """

    context_len: int = 300
    shows_tools: bool = True
    sglang: bool = True
    seen: list[dict[str, Any]] = field(default_factory=list)
    decode_s: float = DECODE_S
    hanging: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def count(self, body: dict[str, Any]) -> int:
        texts = [str(message.get("content") or "") for message in body["messages"]]
        if self.shows_tools:
            texts += [json.dumps(message["tool_calls"]) for message in body["messages"] if "tool_calls" in message]
            texts += [json.dumps(body["tools"])] if "tools" in body else []
        return sum(len(text.split()) for text in texts)

    def trace_calls(self) -> list[dict[str, Any]]:
        """The requests that are not warm-up."""
        return [body for body in self.seen if len(body["messages"][0]["content"]) < 300]


class Handler(BaseHTTPRequestHandler):
    """The HTTP side of `FakeServer`."""

    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, value: object) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        told: dict[str, object] = {"/v1/models": {"data": [{"id": "fake", "max_model_len": self.fake.context_len}]}}
        if self.fake.sglang:
            told |= {"/model_info": {"model_path": "fake"}, "/server_info": {"version": "0.5.23"}}
        self.reply(200 if self.path in told else 404, told.get(self.path, {"detail": "Not Found"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/tokenize" and self.fake.sglang:
            self.reply(200, {"count": self.fake.count(body), "tokens": [], "max_model_len": 1})
        elif self.path != "/v1/chat/completions":
            self.reply(404, {"detail": "Not Found"})
        else:
            self.fake.seen.append(body)
            self.chat(body)

    def chat(self, body: dict[str, Any]) -> None:
        tokens = self.fake.count(body)
        last = body["messages"][-1]["content"]
        if tokens + body["max_tokens"] > self.fake.context_len:
            message = f"The input ({tokens} tokens) is longer than the model's context length"
            return self.reply(400, {"object": "error", "message": message, "code": 400})
        if "FAIL" in last:
            return self.reply(500, {"error": {"message": "out of luck"}})
        if "HANG" in last:
            self.fake.hanging.set()
            self.fake.release.wait(timeout=20)
        time.sleep(PREFILL_S)
        if not body["stream"]:
            return self.reply(200, {"usage": {"prompt_tokens": tokens}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if "ABORT" in last:
            return self.end(body, tokens, {"delta": {}, "finish_reason": "abort"})
        if "CALL" in last:
            call = {"index": 0, "function": {"name": "ask", "arguments": json.dumps({"of": last})}}
            return self.end(body, tokens, {"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"})
        self.stream(body, tokens, broken="BREAK" in last)

    def event(self, value: object) -> None:
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def stream(self, body: dict[str, Any], tokens: int, *, broken: bool) -> None:
        def choice(**fields: object) -> dict[str, object]:
            return {"id": "r1", "choices": [{"index": 0, **fields}]}

        for number, word in enumerate(("hello", " there", " you")):
            entry = {"token": word, "logprob": -0.5, "top_logprobs": [{"token": word, "logprob": -0.5}]}
            logprobs = {"content": [entry]} if body.get("logprobs") else None
            self.event(choice(delta={"content": word}, logprobs=logprobs))
            if broken:
                self.wfile.write(b"0\r\n\r\n")
                return
            if number < 2:
                time.sleep(self.fake.decode_s)
        self.end(body, tokens, {"delta": {}, "finish_reason": "length"})

    def end(self, body: dict[str, Any], tokens: int, choice: dict[str, object]) -> None:
        self.event({"id": "r1", "choices": [{"index": 0, **choice}]})
        if body.get("return_output_ids_in_sglext"):
            details = {"device": tokens // 2 + tokens // 4, "host": 0, "pic": tokens // 4}
            self.event({"choices": [], "sglext": {"output_ids": [[1, 2, 3]], "cached_tokens_details": details}})
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 3}
        if self.fake.sglang:
            usage["prompt_tokens_details"] = {"cached_tokens": tokens // 2 + tokens // 4}
        self.event({"choices": [], "usage": usage})
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


class QuietServer(ThreadingHTTPServer):
    """Says nothing about clients that went away."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A fake server on a free port."""
    state = FakeServer()
    server = QuietServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": state}))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield state
    state.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


def write_trace(path: Path, sessions: dict[str, list[str]]) -> str:
    """A recorded, append-only trace: each session's user messages, answered by `answer N`."""
    with path.open("w") as file:
        for session_id, asked in sessions.items():
            messages: list[dict[str, str]] = []
            for number, text in enumerate(asked):
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": f"answer {number}"}]
            turns = list(range(1, len(messages), 2))
            file.write(json.dumps({"session_id": session_id, "messages": messages, "turns": turns}) + "\n")
    return str(path)


Replay = Callable[..., Path]


@pytest.fixture
def replay(fake: FakeServer, tmp_path: Path) -> Replay:
    """Replays sessions, or a trace at a path, against the fake server; the folder of the run."""

    def run(told: dict[str, list[str]] | str, **options: Any) -> Path:
        trace = told if isinstance(told, str) else write_trace(tmp_path / "t.jsonl", told)
        where = {"base_url": fake.url, "out": str(tmp_path / "run")}
        return run_replay(ReplayOptions(trace=trace, quiet=True, **{**where, **options}))

    return run


def command(fake: FakeServer, trace: str, out: Path, *more: str) -> list[str]:
    """The command line of a replay."""
    verb = "import sys; from sglang_pic.cli import main; sys.exit(main())"
    return [sys.executable, "-c", verb, "replay", trace, "--base-url", fake.url, "--out", str(out), *more]


def record(call: int, **fields: object) -> RequestRecord:
    """A record of session `s`; what the test does not name is plausible."""
    asked = {"session_id": "s", "call": call, "status": "ok", "prompt_key": f"key-{call}", "num_messages": 2}
    times = {"scheduled_at": 0.0, "finished_at": 1.0, "schedule_delay_s": 0.001, "ttft_s": 1.0, "e2e_s": 2.0}
    tokens = {"prompt_tokens": 1000, "prefix_hit_tokens": 100, "chunk_hit_tokens": 0, "computed_tokens": 900}
    logprobs = [["a", math.log(0.9)], ["b", math.log(0.1)]]
    answer = {"output_tokens": 4, "output_text": "same", "first_top_logprobs": logprobs}
    return msgspec.convert({**asked, **times, **tokens, **answer, **fields}, RequestRecord)


def write_records(folder: Path, records: Iterable[RequestRecord]) -> None:
    """`requests.jsonl` of a replay."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requests.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))
