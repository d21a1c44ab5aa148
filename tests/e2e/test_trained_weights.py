"""What only trained weights show on a server: answers and logprobs behind spliced text are near a full prefill's."""

from __future__ import annotations

import pytest

from tests.e2e.servers import on_servers
from tests.e2e.serving import Client, divergence, entries, random_tokens

pytestmark = [pytest.mark.e2e, on_servers("smollm2")]

_BODY = entries(30)


@pytest.mark.feature("logprobs of the prompt")
def test_where_input_logprobs_begin_nothing_is_spliced(client: Client) -> None:
    """Before that position runs are used; from it on every token is computed, and its logprob is a full prefill's."""
    prompt = random_tokens(18, 300)
    client.generate(prompt)
    shifted = [*random_tokens(19, 40), *prompt]
    start = len(shifted) - 60
    spliced = client.generate(shifted, logprob_start_len=start)
    assert spliced.chunk_hit_tokens == start - (40 + 32) - 1, "the sink of the donor and the seam are computed"
    full = client.generate(shifted, pic={"mode": "off"}, logprob_start_len=start)
    assert len(spliced.input_logprobs) == len(full.input_logprobs) >= 59
    apart = [abs(a - b) for a, b in zip(spliced.input_logprobs, full.input_logprobs, strict=True)]
    assert sorted(apart)[len(apart) // 2] < 0.3


def test_a_shifted_answer_stays_close(client: Client) -> None:
    """Real weights, real text: the greedy answer after a shift is the one a full prefill gives."""
    document = "The harbour of Velm was built in 1871 by the engineer Ada Brink. " * 3 + _BODY
    question = " Question: Who built the harbour of Velm? Answer: The engineer"
    tokenize = client.post("/tokenize", {"prompt": "Notes. " + document + question})["tokens"]
    shifted = client.post("/tokenize", {"prompt": "These are some other notes. " + document + question})["tokens"]
    client.generate(tokenize)
    spliced = client.generate(shifted)
    full = client.generate(shifted, pic={"mode": "off"})
    assert spliced.chunk_hit_tokens > 300
    assert divergence(full.first_token, spliced.first_token) < 0.05
    assert spliced.ids[0] == full.ids[0]
