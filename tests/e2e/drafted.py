"""Requests to servers with a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.e2e.serving import Client, greedy

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
