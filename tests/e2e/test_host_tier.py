"""HiCache on servers: text whose rows left the device for the host is spliced from there."""

from __future__ import annotations

import json

import pytest

from tests.e2e.servers import on_each_server
from tests.e2e.serving import Answer, Client, assert_same, random_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.feature("HiCache")]
TEXT = random_tokens(1, 500)
MOVED = [*random_tokens(2, 150), *TEXT, *random_tokens(3, 100)]


def served(client: Client, *, on_host: bool) -> Answer:
    """The moved text behind its donor, whose rows are still there or have left the device."""
    client.flush()
    client.generate(TEXT)
    if on_host:
        pool = json.loads(client.server.get("/server_info"))["max_total_tokens"]
        for number in range(-(-pool // 600) + 1):
            client.generate(random_tokens(100 + number, 600), max_new_tokens=1)
    return client.generate(MOVED)


@on_each_server("gqa_page1.small_pool", "mla_page16_tp2")
def test_moved_text_is_spliced_from_the_host_as_from_the_device(client: Client) -> None:
    """To the last bit: the rows are the same, and so is their rotation."""
    device, host = (served(client, on_host=on_host) for on_host in (False, True))
    assert device.fetched_tokens == 0 < host.fetched_tokens == host.chunk_hit_tokens
    assert host.chunk_hit_tokens == device.chunk_hit_tokens > 400
    assert_same(device, host)
