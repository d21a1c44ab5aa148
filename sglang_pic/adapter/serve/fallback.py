"""The reasons why a request, or a run of it, was computed instead of spliced."""

from __future__ import annotations

from typing import Final

from sglang_pic.core import DropReason, Reason


class Fallback(Reason):
    """Reasons of the server; the planner's own are in `DropReason`."""

    AUDIT = "audit", "Audits have switched splicing off in the request's namespace."
    BATCH = "batch", "Another request of the batch has input embeddings or wants hidden states."
    EMBEDDINGS = "embeddings", "The request has input embeddings, so its tokens do not determine its KV."
    FAULT_ACCOUNTING = "fault_accounting", "An exception while an admitted request was counted."
    FAULT_AUDIT = "fault_audit", "An exception in an audit; waiting audits were dropped, requests are not affected."
    FAULT_GAPS = "fault_gaps", "An exception while a gap prefill was laid out or computed."
    FAULT_OPTIONS = "fault_options", "An exception while a request was received; it was served with mode off."
    FAULT_PINS = "fault_pins", "An exception while a prompt was pinned or unpinned; all pins were released."
    FAULT_PLAN = "fault_plan", "An exception while a request was planned."
    FAULT_PUBLICATION = "fault_publication", "An exception while a request's chunks were published."
    FAULT_RESOLVE = "fault_resolve", "An exception while donors were looked up in the radix tree."
    FAULT_SPLICE = "fault_splice", "An exception while rows were moved."
    FAULT_STORE = "fault_store", "An exception while HiCache's store was read or written; affected tokens are computed."
    FAULTS = "faults", "Faults have switched splicing off, or emptied the index after the request was received."
    HIDDEN_STATES = "hidden_states", "The request wants hidden states of its prompt."
    INPUT_LOGPROBS = "input_logprobs", "The request wants logprobs of its whole prompt."
    KEY = "key", "The request's extra_key or cache_salt has more than 1,024 characters."
    MEDIA = (
        "media",
        "The request has video or audio, or images that this server cannot move: with another class of model, a store "
        "of HiCache, PD disaggregation or DP attention, a draft without M-RoPE beside a model with it, or two "
        "images to which SGLang gives one id.",
    )
    MEMORY = "memory", "The KV pool was too full to lock the donors and admit the request."
    OFF = "off", "The request opted out, the server's settings exclude it, or the server is prefix only."
    SCORING = "scoring", "The request is scored at positions inside its prompt, which must be computed."
    SESSION = "session", "A streaming session owns the request's rows."
    SWITCHED = "switched", "An operator has switched splicing off on the running server."


REASONS: Final[tuple[Reason, ...]] = (*DropReason, *Fallback)
"""Every label of `sglang:pic_fallbacks_total`."""
