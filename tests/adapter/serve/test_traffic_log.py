"""The line a minute in the log of a server with traffic."""

from __future__ import annotations

import logging

import pytest

from sglang_pic.adapter.serve.feature import Feature, Features
from sglang_pic.adapter.serve.traffic_log import TrafficLog


class Audited(Feature):
    def summary(self) -> str:
        return "10 audits"


@pytest.mark.parametrize(
    ("features", "said"), [(Features(), "audits are off"), (Features([Feature(), Audited()]), "saved; 10 audits")]
)
def test_a_line_sums_up_a_minute(features: Features, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    log = TrafficLog(features, lambda: now)
    for now, is_new in ((5.0, True), (30.0, False), (64.9, True)):  # noqa: B007
        log.note(is_new=is_new, prefix=100, spliced=300, computed=600, saved_us=5e5)
    assert caplog.messages == []
    now = 125.0
    log.note(is_new=True, prefix=0, spliced=0, computed=1000, saved_us=0.0)
    (line,) = caplog.messages
    assert "120 s: 2 requests, 3000 prompt tokens: 10.0 % prefix hits, 30.0 % spliced, 60.0 % computed" in line
    assert "about 1.50 s of prefill saved" in line
    assert said in line
    now = 190.0
    log.note(is_new=True, prefix=0, spliced=0, computed=1000, saved_us=0.0)
    assert "65 s: 1 requests, 1000 prompt tokens: 0.0 %" in caplog.messages[1], "a line begins anew"
