"""Why a request, or a run of it, was computed although the cache was on."""

from __future__ import annotations

from typing import Final

from sglang_pic.core import DropReason, Reason


class Fallback(Reason):
    """The reasons that only a server can tell; the planner's own are `DropReason`."""

    AUDIT = "audit", "Audits have switched splicing off in the request's namespace."
    BATCH = "batch", "Another request of the batch brings input embeddings or wants hidden states."
    EMBEDDINGS = "embeddings", "The request brings embeddings, so its tokens do not determine its KV."
    FAULT_ACCOUNTING = "fault_accounting", "An exception while an admitted request was counted."
    FAULT_AUDIT = "fault_audit", "An exception in an audit; waiting audits were given up, requests are not affected."
    FAULT_GAPS = "fault_gaps", "An exception while a gap prefill was laid out or computed."
    FAULT_OPTIONS = "fault_options", "An exception while a request was received; it was served with mode off."
    FAULT_PINS = "fault_pins", "An exception while a prompt was pinned or a pin given back; all pins were given back."
    FAULT_PLAN = "fault_plan", "An exception while a request was planned."
    FAULT_PUBLICATION = "fault_publication", "An exception while a request's chunks were published."
    FAULT_RESOLVE = "fault_resolve", "An exception while donors were looked up in the radix tree."
    FAULT_SPLICE = "fault_splice", "An exception while rows were moved."
    FAULT_STORE = (
        "fault_store",
        "An exception while HiCache's store was asked, or told of rows; what it was about is computed.",
    )
    FAULTS = "faults", "Faults have switched splicing off, or a fault emptied the index after the request had come."
    HIDDEN_STATES = "hidden_states", "The request wants hidden states of its prompt."
    INPUT_LOGPROBS = "input_logprobs", "The request wants logprobs of its prompt."
    KEY = "key", "The request's extra_key or cache_salt has more than 1,024 characters."
    MEDIA = (
        "media",
        "The request brings video or audio, or images that this server cannot move: of another class of model, with "
        "HiCache, PD disaggregation or DP attention, or two that SGLang takes for one.",
    )
    MEMORY = "memory", "The pool was too full to hold the donors while the request was admitted."
    OFF = "off", "The request opted out, or the server's settings keep it out."
    SCORING = "scoring", "The request is scored at places in the middle of its prompt, which must be computed."
    SESSION = "session", "A streaming session owns the request's row."
    SWITCHED = "switched", "An operator has switched splicing off on the running server."


REASONS: Final[tuple[Reason, ...]] = (*DropReason, *Fallback)
"""Every label of `sglang:pic_fallbacks_total`."""
