"""The line of each minute sums up what was admitted since the last one, while there is traffic."""

from __future__ import annotations

import logging

import pytest

from sglang_pic.adapter.serve.auditor import Auditor, Drift
from sglang_pic.adapter.serve.traffic_log import TrafficLog


class Audited(Auditor):
    """One more audit whenever it is asked."""

    num_asked = 0

    def drift(self) -> Drift:
        self.num_asked += 1
        return Drift(num_audited=10 * self.num_asked, kl=0.0123, limit=0.25)


@pytest.mark.parametrize(
    ("auditor", "said"), [(Auditor(), "audits are off"), (Audited(), "10 audits, worst mean KL 0.0123 of at most 0.25")]
)
def test_a_line_sums_up_a_minute(auditor: Auditor, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    log = TrafficLog(auditor, lambda: now)
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
