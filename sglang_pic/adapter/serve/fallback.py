"""Why a request, or a run of it, was computed although the cache was on."""

from __future__ import annotations

from typing import Final

from sglang_pic.core import DropReason, Reason


class Fallback(Reason):
    """The reasons that only a server can tell; the planner's own are `DropReason`."""

    ADAPTER = "adapter", "The request uses a LoRA adapter, which shapes the KV."
    AUDIT = "audit", "Audits have switched splicing off in the request's namespace."
    BATCH = "batch", "Another request of the batch brings input embeddings or wants hidden states."
    EMBEDDINGS = "embeddings", "The request brings embeddings or media, so its tokens do not determine its KV."
    HIDDEN_STATES = "hidden_states", "The request wants hidden states of its prompt."
    INPUT_LOGPROBS = "input_logprobs", "The request wants logprobs of its prompt."
    MEMORY = "memory", "The pool was too full to hold the donors while the request was admitted."
    OFF = "off", "The request opted out."
    SCORING = "scoring", "The request is scored at places in the middle of its prompt, which must be computed."
    SESSION = "session", "A streaming session owns the request's row."


REASONS: Final[tuple[Reason, ...]] = (*DropReason, *Fallback)
"""Every label of `sglang:pic_fallbacks_total`."""
