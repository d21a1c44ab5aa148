"""The plugin's own counters and SGLang's of verified drafts, read from the text of a Prometheus page."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

_TOLD = re.compile(r"sglang[:_](pic_|spec_verify_calls_total$)")
# SGLang's own labels say which rank and model: the same in every sample of a run, so they are left out of the keys.
_OWN_LABELS = frozenset({"source", "reason", "policy", "mode"})


def pic_counters(page: str) -> dict[str, float]:
    """Every `sglang:pic_*` sample of `page`, summed over ranks; the key keeps the labels that tell samples apart.

    With speculative decoding also `sglang:spec_verify_calls_total`: tokens of answers by it are the accepted length.

    Histogram buckets and creation times are left out: their `_sum` and `_count` stay.
    """
    found: dict[str, float] = {}
    for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
        if _TOLD.match(sample.name) and not sample.name.endswith(("_bucket", "_created")):
            labels = ",".join(f"{name}={sample.labels[name]}" for name in sorted(_OWN_LABELS & sample.labels.keys()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            found[key] = found.get(key, 0.0) + sample.value
    return dict(sorted(found.items()))
