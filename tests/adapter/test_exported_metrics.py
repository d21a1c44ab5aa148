"""What is exported while requests are planned, spliced, published and counted by tenant."""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pic.adapter.features import tenants
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve import forward, frontend, publish
from sglang_pic.adapter.serve.account import Accounting
from sglang_pic.adapter.serve.feature import Feature, Features
from sglang_pic.adapter.serve.forward import ForwardPath
from sglang_pic.adapter.serve.rows import Reads, Splice
from sglang_pic.adapter.serve.traffic_log import TrafficLog
from tests.helpers.builders import Server, make_planning

TEXT = [7 * i % 997 + 1 for i in range(300)]
LABELS = {"model_name": "m"}


def test_plans_the_index_and_tenants_are_exported(registry: Any) -> None:
    server = Server()
    server.stations.series = lambda metrics: Series(metrics, LABELS)
    server.planning = make_planning(server.stations)
    server.publication = publish.Publication(server.index, frozenset(), Series(publish.METRICS, LABELS))
    counts = tenants.Tenants(Series(tenants.METRICS, LABELS))
    server.serve(TEXT, cache_salt="acme")
    server.publication.settle()
    req = server.plan([1, *TEXT], cache_salt="acme")
    for start, end in ((0, 200), (190, 301)):  # It is retracted in between.
        req.prefix_len, req.extend_end = start, end
        planned = req.pic.admit(start, end, first_chunk=True)
        Accounting(Series((), None)).count_admitted(req, planned, None, first_chunk=True)
        counts.on_admitted(req)
        req.pic.release_row()

    def value(name: str, **labels: str) -> float:
        return float(registry.get_sample_value(name, {**LABELS, **labels}))

    tenant = hashlib.sha256(b"acme").hexdigest()[:8]
    assert value("sglang:pic_tenant_prompt_tokens_total", tenant=tenant) == 301
    assert value("sglang:pic_tenant_spliced_tokens_total", tenant=tenant) == req.pic.counts.chunk_hit > 100
    assert value("sglang:pic_plan_seconds_count") == 2
    assert value("sglang:pic_index_tokens") == server.index.num_tokens == 300
    assert value("sglang:pic_index_bytes") == server.index.num_bytes > 0
    assert value("sglang:pic_index_max_tokens") == server.config.core.max_index_tokens
    server.publication.flush()
    assert value("sglang:pic_index_tokens") == 0


def test_a_tenant_is_named_by_its_salt_and_never_by_an_adapter() -> None:
    names = [
        Namespace("key", "salt").tenant,
        Namespace(None, "salt").tenant,
        Namespace("key").tenant,
        Namespace("keyadapter", adapter="adapter").tenant,
        Namespace("adapter", adapter="adapter").tenant,
    ]
    salt, key = (hashlib.sha256(name).hexdigest()[:8] for name in (b"salt", b"key"))
    assert names == [salt, salt, key, key, "none"]


def test_splices_are_timed_once_the_server_serves(registry: Any) -> None:
    splicer: Any = SimpleNamespace(splice=lambda *_: None)
    path = ForwardPath(splicer, Features(), None, (), Series(forward.METRICS, LABELS))  # type: ignore[arg-type]
    moved: Any = Splice(None, None, None)  # type: ignore[arg-type]
    gap: Any = SimpleNamespace(reads=Reads(moved), locks=ExitStack())
    for is_trial in (True, False):
        path._move(gap, is_trial=is_trial)
    assert registry.get_sample_value("sglang:pic_splice_seconds_count", LABELS) == 1


@pytest.mark.parametrize("details", [None, [None], [{"device": 90, "pic": 70}]])
def test_a_requests_span_has_what_its_response_has(details: Any) -> None:
    """SGLang's own attributes stay, and SGLang's own parts of the prefix hit are no attributes."""
    asked = {"gen_ai.request.id": "r"}
    found = frontend._with_span_attributes(asked, None, None, SimpleNamespace(cached_tokens_details=details), 0)
    assert found == ({**asked, "sglang.pic": 70} if details and details[0] else None)


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
