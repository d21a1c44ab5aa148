"""A real server tells what it can splice, and no more."""

from __future__ import annotations

import pytest

from sglang_pic.core import as_tokens
from sglang_pic.route import wire
from sglang_pic.route.sketch import cut
from tests.e2e.listener import Listener
from tests.e2e.servers import EVENTS_SALT, on_servers
from tests.e2e.serving import Client, random_tokens

_LEN, _LIMIT_S = 400, 60.0


@pytest.mark.e2e
@on_servers("gqa_page16.small_pool")
def test_a_server_tells_what_it_can_splice_until_it_is_gone(client: Client) -> None:
    """Text appears when it was computed, in its own namespace; opted out it does not; evicted or flushed it goes."""
    salt = wire.read_salt(str(EVENTS_SALT))
    listener = Listener(client.internal_state()["content_events"]["endpoint"], salt)

    def names(seed: int, extra_key: str | None = None) -> set[int]:
        assert listener.cutting is not None
        tokens = as_tokens(random_tokens(seed, _LEN))
        found = cut(tokens, wire.namespace_bytes(extra_key, None), salt, chunker=listener.cutting.chunker)
        # Chunks in the sink are no donors, and the last one goes on in the answer.
        return set(found.names[(found.ends > 100) & (found.ends < _LEN - 64)].tolist())

    try:
        client.generate(random_tokens(1, _LEN))
        client.generate(random_tokens(2, _LEN), extra_key="tenant")
        client.generate(random_tokens(3, _LEN), pic={"mode": "off"})
        listener.wait_until(lambda: listener.num_begun > 0, _LIMIT_S)
        wanted = names(1) | names(2, "tenant")
        listener.wait_until(lambda: wanted <= listener.names, _LIMIT_S)
        assert not listener.names & (names(2) | names(3))
        for seed in range(10, 18):
            client.generate(random_tokens(seed, _LEN))
        listener.wait_until(lambda: names(17) <= listener.names and not listener.names & names(1), _LIMIT_S)
        client.flush()
        listener.wait_until(lambda: not listener.names, _LIMIT_S)
    finally:
        listener.close()
