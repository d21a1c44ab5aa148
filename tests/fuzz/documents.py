"""Documents that are nearly right: the keys that the readers know, with values of any kind and size."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

_KEYS = {
    "trace": "messages role content turns prompts agents session_id source tools user"
    " body request metadata response completion choices message tool_choice",
    "records": "session_id call status prompt_key num_messages scheduled_at finished_at error",
    "stream": "usage prompt_tokens completion_tokens prompt_tokens_details cached_tokens sglext choices"
    " delta content reasoning_content logprobs top_logprobs token logprob finish_reason"
    " cached_tokens_details output_ids pic device error object code message id",
    "options": "pic mode preset careful balanced most seam_tokens tail_tokens edit skills"
    " pin pin_ttl_s pin_priority unpin",
    "config": "core max_gaps max_runs cost_gate self_test audit_rate audit_min audit_window"
    " seam_tokens chunk_avg_tokens chunk_min_tokens chunk_max_tokens max_index_tokens edit",
}
_WORDS = ("auto", "off", "near", "notes", "in_place", "user", "ok", "a skill", "", "é\u2028\x00", "[DONE]", "error")
_NUMBERS = st.integers(-2, 70) | st.integers() | st.floats()


def documents(target: str) -> st.SearchStrategy[bytes]:
    """Bytes for a target: lines, or events, of JSON with its keys; now and then cut off or with a byte changed."""
    keys = st.sampled_from(_KEYS[target].split())
    leaves = st.none() | st.booleans() | _NUMBERS | st.sampled_from(_WORDS) | st.text(max_size=8)
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6), max_leaves=20
    )
    objects = st.dictionaries(keys, values, max_size=6)
    start, end = (b"data: ", b"\n\n") if target == "stream" else (b"", b"\n")
    lines = st.lists(objects | values, min_size=1, max_size=3)
    whole = lines.map(lambda found: b"".join(start + _encode(value) + end for value in found))
    if target == "trace":
        whole = st.builds(lambda kind, text: bytes([kind]) + text, st.integers(0, 7), whole)
    return st.builds(_broken, whole, st.none() | st.tuples(st.integers(0, 400), st.binary(max_size=3)))


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return b'"\\ud800"'


def _broken(text: bytes, change: tuple[int, bytes] | None) -> bytes:
    return text if change is None else text[: change[0]] + change[1] + (text[change[0] + 1 :] if change[1] else b"")
