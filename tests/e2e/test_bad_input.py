"""Any options of a request through a real server: served, or refused with HTTP 400 and without a trace.

The plugin adds no route, so what it adds to SGLang's is what is fuzzed.
"""

from __future__ import annotations

import copy
import json
import os
from itertools import cycle
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from sglang_pic.adapter.serve.options import parse_options
from sglang_pic.errors import BenchError, ConfigError
from tests.e2e.servers import on_servers
from tests.e2e.serving import Client
from tests.fuzz.documents import documents

pytestmark = [pytest.mark.e2e, on_servers("text")]

NUM_REQUESTS = int(os.environ.get("PIC_FUZZ_REQUESTS", "40"))


def values(num: int) -> list[Any]:
    """What documents of options hold, each once; such that JSON can say it again."""
    found: dict[str, Any] = {}

    @settings(max_examples=2 * num, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(documents("options"))
    def collect(data: bytes) -> None:
        for line in data.splitlines():
            try:
                value = json.loads(line)
                found[json.dumps(value, allow_nan=False, ensure_ascii=False)] = value
            except ValueError:
                continue

    collect()
    return list(found.values())[:num]


def is_valid(value: Any) -> bool:
    try:
        parse_options({"pic": value})
    except ConfigError:
        return False
    return True


WAYS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"model": "m", "prompt": "a", "max_tokens": 1},
}


def refusal(client: Client, value: Any, path: str) -> str:
    """How the server refuses a request with this value; empty where it serves it."""
    body = copy.deepcopy(WAYS[path])
    body.get("sampling_params", body)["custom_params"] = {"pic": value}
    try:
        client.post(path, body)
    except BenchError as error:
        return str(error)
    return ""


def test_any_options_are_served_or_refused_without_a_trace(client: Client) -> None:
    asked = [*values(NUM_REQUESTS), {"mode": "auto"}, {"mode": "off"}, {"seam_tokens": 8}, None]
    refused = [value for value in asked if not is_valid(value)]
    assert len(refused) >= NUM_REQUESTS / 4
    ways, before = cycle(WAYS), client.counters()
    for path in WAYS:
        assert "seam_tokens=-1" in refusal(client, {"seam_tokens": -1}, path)
    for value in refused:
        assert "HTTP 400" in refusal(client, value, next(ways)), value
    assert client.counters() == before, "what is refused changes nothing"
    for value in (value for value in asked if is_valid(value)):
        assert refusal(client, value, next(ways)) == "", value
    print(f"{len(refused)} of {len(asked)} requests were refused")
