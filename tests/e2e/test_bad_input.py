"""Any options of a request through a real server: served, or refused with HTTP 400 and without a trace.

The plugin adds no route, so what it adds to SGLang's is what is fuzzed. `make fuzz` sends many more.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from sglang_pic.adapter.serve.options import parse_options
from sglang_pic.errors import BenchError, ConfigError
from tests.e2e.servers import on_servers
from tests.e2e.serving import Client
from tests.fuzz.documents import documents

pytestmark = [pytest.mark.e2e, on_servers("smollm2")]

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


def status(client: Client, value: Any, *, chat: bool) -> int:
    params = {"custom_params": {"pic": value}}
    try:
        if chat:
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **params}
            client.post("/v1/chat/completions", body)
        else:
            client.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1, **params}})
    except BenchError as error:
        found = re.search(r"HTTP (\d+)", str(error))
        return int(found[1]) if found else 0
    return 200


def test_any_options_are_served_or_refused_without_a_trace(client: Client) -> None:
    asked = [*values(NUM_REQUESTS), {"mode": "auto"}, {"mode": "off"}, {"seam_tokens": 8}, None]
    refused = [value for value in asked if not is_valid(value)]
    assert len(refused) >= NUM_REQUESTS / 4
    before = client.counters()
    for number, value in enumerate(refused):
        assert status(client, value, chat=number % 2 == 0) == 400, value
    assert client.counters() == before, "what is refused changes nothing"
    for number, value in enumerate([value for value in asked if is_valid(value)]):
        assert status(client, value, chat=number % 2 == 0) == 200, value
    print(f"{len(refused)} of {len(asked)} requests were refused")
