"""HiCache on servers: text whose rows left the device for the host is spliced from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import on_each_server
from tests.e2e.serving import Answer, Client, assert_same, random_tokens, serve, wait_until

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


@pytest.mark.slow
@pytest.mark.feature("a store of HiCache")
def test_a_store_holds_what_any_server_would_compute(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """What one server computed serves others, and donates there; what it spliced reaches nobody else."""
    flags = (
        *("--dtype", "float32", "--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "4"),
        *("--hicache-storage-backend", "file", "--file-storage-path", str(tmp_path / "store")),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    )
    gate: dict[str, Any] = {"cost_gate": "off"}

    def stored() -> int:
        return len([*(tmp_path / "store").glob("*.bin")])

    with serve(model_dir("tiny-gqa"), tmp_path, *flags, config=gate) as first:
        first.generate(TEXT)
        wait_until(lambda: stored() >= len(TEXT) // 16)
        spliced = first.generate(MOVED)
        assert spliced.chunk_hit_tokens > 400
        apart = first.generate(MOVED, pic={"mode": "off"})
        wait_until(lambda: stored() >= (len(TEXT) + len(MOVED)) // 16)
    with serve(model_dir("tiny-gqa"), tmp_path, *flags, backend=None) as stock:
        assert stock.generate(TEXT).cached_tokens >= 480, "it was computed, and the key is the text's"
        exact = stock.generate(MOVED)
        assert exact.cached_tokens == 0, "nothing behind a splice was written under the text's key"
        assert_same(exact, apart)
    with serve(model_dir("tiny-gqa"), tmp_path, *flags, config=gate) as second:
        moved = second.generate(MOVED)
        assert moved.stored_tokens > 300, "what nobody ever sent it at that place, nor at any other"
        assert moved.chunk_hit_tokens == moved.fetched_tokens == moved.stored_tokens
        again = second.generate([*random_tokens(8, 200), *TEXT, *random_tokens(9, 100)])
        assert again.chunk_hit_tokens > again.stored_tokens == 0, "it is a donor here from then on"
