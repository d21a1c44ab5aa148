"""The metrics of rows that are computed again, and why that ends."""

from __future__ import annotations

from typing import Final

from sglang_pic.adapter.metrics import Metric, MetricKind, descriptions
from sglang_pic.core import Reason


class HealEnd(Reason):
    """Why no more rows of a prompt are computed again."""

    DONE = "done", "All of them were."
    EVICTED = "evicted", "Its rows had left the radix tree."
    FLUSHED = "flushed", "The cache was flushed or the weights changed, or there was a fault."
    QUEUE_FULL = "queue_full", "Prompts that came later took its place."
    SUSPENDED = "suspended", "Splicing was switched off in its namespace, or its LoRA adapter left the device."


TOKENS: Final = Metric(
    "sglang:pic_renewed_tokens_total",
    MetricKind.COUNTER,
    "Tokens whose rows were computed again in their slots. No other counter includes them.",
    label="kind",
    values={
        "repair": "At the end of a prompt, beside its answer (repair_tokens).",
        "heal": "Of a prompt that a later request begins with, while the server was idle (heal_ratio).",
    },
)
ENDED: Final = Metric(
    "sglang:pic_renewals_total",
    MetricKind.COUNTER,
    "Prompts of which rows were to be computed again, by how that ended.",
    label="reason",
    values=descriptions(HealEnd),
)
METRICS: Final = (TOKENS, ENDED)
