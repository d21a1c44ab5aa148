"""The plugin's own counters and SGLang's of verified drafts, read from the text of a Prometheus page."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(
    r"^(?P<name>sglang[:_](?:pic_[A-Za-z0-9_:]+|spec_verify_calls_total))"
    r"(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)"
)
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
# SGLang's own labels say which rank and model: the same in every sample of a run, so they are left out of the keys.
_OWN_LABELS = frozenset({"source", "reason", "policy", "mode"})


def pic_counters(page: str) -> dict[str, float]:
    """Every `sglang:pic_*` sample of `page`, summed over ranks; the key keeps the labels that tell samples apart.

    With speculative decoding also `sglang:spec_verify_calls_total`: tokens of answers by it are the accepted length.

    Histogram buckets and creation times are left out: their `_sum` and `_count` stay.
    """
    found: dict[str, float] = {}
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match["name"].endswith(("_bucket", "_created")):
            continue
        labels = [f"{k}={v}" for k, v in _LABEL.findall(match["labels"] or "") if k in _OWN_LABELS]
        key = match["name"] + (f"{{{','.join(sorted(labels))}}}" if labels else "")
        found[key] = found.get(key, 0.0) + float(match["value"])
    return dict(sorted(found.items()))


def counters_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much every counter has grown between two pages of one server."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}
