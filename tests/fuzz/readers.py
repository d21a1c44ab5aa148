"""What is fuzzed: each target takes any bytes, and fails with anything but the errors that its reader documents.

`test_fuzz.py` runs them.
"""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pic_replay.client import StreamReply, _take_event, error_message, read_events
from pic_replay.records import RequestRecord, Status, load_records
from pic_replay.result import Asked, build_record
from pic_traces import load
from pic_traces.errors import TraceError

from sglang_pic.adapter.serve.options import MAX_TOKENS, SETTINGS, RequestOptions, parse_options
from sglang_pic.config import read_config
from sglang_pic.core import CoreConfig
from sglang_pic.errors import ConfigError

_FOLDER = Path(tempfile.mkdtemp(prefix="pic-fuzz-"))
_NAMES = ("log.jsonl", "log.json", "log.jsonl.gz", "log.json.gz")
_SERVER = CoreConfig()


def trace(data: bytes) -> None:
    """A trace file, its name and packing by the first byte: `TraceError`, or sessions with their calls."""
    path = _FOLDER / _NAMES[data[0] & 3 if data else 0]
    body = data[1:]
    path.write_bytes(gzip.compress(body, 1) if data and data[0] & 4 else body)
    message = str(path)
    try:
        msgspec.json.encode([list(session.calls()) for session in load(path)])
    except TraceError as error:
        message = str(error)
    assert str(path) in message, "an error names the file"


def records(data: bytes) -> None:
    """The records of a replay: `TraceError`, or records that are written as they were read."""
    (_FOLDER / "requests.jsonl").write_bytes(data)
    try:
        found = load_records(_FOLDER)
    except TraceError:
        return
    msgspec.json.decode(msgspec.json.encode(found), type=list[RequestRecord])


def stream(data: bytes) -> None:
    """A stream of server-sent events: a record that can be written, whatever a server sends."""
    reply = StreamReply()
    for event in read_events(io.BytesIO(data)):
        if event == b"[DONE]":
            break
        _take_event(reply, event, 1.0)
    asked = Asked("session", 0, None, False, "key", 1, 0.0)
    record = build_record(asked, reply, Status.OK, clock_zero=0.0, finished_at=2.0, is_sglang=True)
    msgspec.json.decode(msgspec.json.encode(record), type=RequestRecord)
    error_message(data.decode("utf8", "replace"))


def options(data: bytes) -> None:
    """A request's `custom_params`: `ConfigError`, or options inside their bounds."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    check_options({"pic": value})
    check_options(value)


def check_options(custom_params: Any) -> RequestOptions | None:
    """The options, or `None` where they were refused by an error that names the field; the input stays as it was."""
    before, parsed, message = repr(custom_params), None, ""
    try:
        parsed = parse_options(custom_params)
    except ConfigError as error:
        message = str(error)
    assert repr(custom_params) == before
    assert parsed is not None or message.startswith("custom_params.pic")
    assert len(message) < 1_000, "an error goes to a log and to a client"
    if parsed is not None:
        policy = parsed.policy(_SERVER)
        assert parsed.lane(_SERVER) in (None, "in_place", "recompile")
        assert all(SETTINGS[name].allows(getattr(policy, name)) for name in parsed.overrides)
        assert max(policy.seam_tokens, policy.tail_tokens) <= MAX_TOKENS
    return parsed


def config(data: bytes) -> None:
    """The text of `SGLANG_PIC_CONFIG`, and the content of the file that it names: `ConfigError` or a configuration."""
    path = _FOLDER / "config.json"
    path.write_bytes(data)
    for text in (data.decode("utf8", "surrogateescape").replace("\0", ""), str(path)):
        try:
            found = read_config(text)
        except ConfigError:
            continue
        assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (trace, records, stream, options, config)
}
