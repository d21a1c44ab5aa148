"""Metrics are exported as declared; board and rules read metrics that exist, and alerts are raised when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sglang_pic.adapter.features.audit import audit_metrics as audit
from sglang_pic.adapter.metrics import Series
from tests.conftest import ROOT

pytest.importorskip("torch", reason="the list of metrics is read from the adapter")
from pic_bench.pages.reference import METRICS

FOLDER = ROOT / "sglang_pic" / "monitoring"
BOARD = FOLDER / "grafana" / "sglang-pic.json"
RULES = FOLDER / "rules.yaml"
DECLARED = {metric.name: metric for metric in METRICS}
NOT_OURS = {"sglang:time_to_first_token", "sglang:num_queue_reqs"}
"""SGLang's."""


def promtool(*words: str | Path) -> str:
    """What `promtool` says about files that it finds nothing wrong with."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed here; Debian's package prometheus has it")
    done = subprocess.run([tool, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> list[dict[str, str]]:
    """All rules of all groups."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def shown_queries() -> list[str]:
    """The queries of the board as Grafana would send them."""
    values = {"$__rate_interval": "5m", "$__range": "1h", "$model": ".*", "$instance": ".*"}
    panels = json.loads(BOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [re.sub(r"\$\w+", lambda found: values[found[0]], query) for query in queries]


def selectors() -> Iterator[tuple[str, str, str, str]]:
    """(series, label, operator, value) for every series that the board and the rules read; no label for a plain one."""
    for query in [*shown_queries(), *(rule["expr"] for rule in rules())]:
        for name, matchers in re.findall(r"(sglang:\w+)(?:\{(.*?)\})?", query):
            yield name, "", "", ""
            for label, operator, value in re.findall(r'(\w+)(=~?)"(.*?)"', matchers):
                yield name, label, operator, value


def test_every_series_is_declared_and_every_label_has_its_value() -> None:
    for name, label, operator, value in selectors():
        base = name.removesuffix("_bucket")
        if base.removesuffix("_seconds") in NOT_OURS:
            continue
        metric = DECLARED[base]
        if label and label not in ("model_name", "instance"):
            assert label == metric.label, name
            wanted = re.escape(value) if operator == "=" else value
            assert any(re.fullmatch(wanted, one) for one in metric.values), (name, value)
    for query in shown_queries():
        for label in re.findall(r"by \((.*?)\)", query):
            known = {"le", "instance", "model_name", "dp_rank"} | {DECLARED[name].label for name in DECLARED}
            assert set(label.split(", ")) <= known, query


def test_what_compose_starts_listens_on_this_machine_only_and_has_a_password() -> None:
    """Both share the host's network, to reach a server on 127.0.0.1, so that each must name its own address."""
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    environment = services["grafana"]["environment"]
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert not any("ports" in service for service in services.values())


def test_each_alert_has_its_place_in_the_runbook() -> None:
    headings = re.findall(r"^## (\w+)$", (FOLDER.parent / "RUNBOOK.md").read_text(), re.MULTILINE)
    alerts = [rule for rule in rules() if "alert" in rule]
    assert [rule["alert"] for rule in alerts] == headings
    assert all(
        rule["annotations"]["runbook_url"] == f"{{{{ $externalURL }}}}/user/RUNBOOK.txt#{rule['alert'].lower()}"  # type: ignore[index]
        for rule in alerts
    )


def test_prometheus_reads_rules_and_every_query_of_the_board(tmp_path: Path) -> None:
    for name in ("prometheus.yaml", "rules.yaml", "targets.yaml"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    promtool("check", "config", tmp_path / "prometheus.yaml")
    queries = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(shown_queries())]
    (tmp_path / "board.yaml").write_text(json.dumps({"groups": [{"name": "board", "rules": queries}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", tmp_path / "board.yaml")


def test_alerts_are_raised_and_not_without_need(tmp_path: Path) -> None:
    cases = Path(__file__).with_name("rules_test.yaml").read_text()
    (tmp_path / "tests.yaml").write_text(cases.replace("[RULES]", json.dumps([str(RULES)])))
    promtool("test", "rules", tmp_path / "tests.yaml")


LABELS = {"model_name": "m", "tp_rank": "0"}


def samples(registry: object) -> dict[tuple[str, str | None], float]:
    """Every number by name and by its own label's value."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name not in LABELS]
            assert {name: sample.labels[name] for name in LABELS} == LABELS
            found[sample.name, own[0] if own else None] = sample.value
    return found


def buckets(registry: object, bound: str) -> float:
    """What the audit's histogram has counted up to a bound, in all windows."""
    found = [s for family in registry.collect() for s in family.samples if s.name == f"{audit.KL.name}_bucket"]
    return sum(sample.value for sample in found if sample.labels["le"] == bound)


def test_every_value_of_a_label_is_exported_from_the_start(registry: object) -> None:
    series = Series(audit.METRICS, LABELS)
    before = samples(registry)
    for reason in audit.AuditSkip:
        assert before[audit.SKIPPED.name, reason.value] == 0
    assert before[audit.LIMIT.name, None] == 0
    series.add(audit.SKIPPED, 3, value="memory")
    series.add(audit.TOKENS, 256)
    series.set(audit.LIMIT, 0.2)
    series.set(audit.SUSPENDED, 2, value="changed")
    series.observe(audit.KL, 0.02, value="plain")
    after = samples(registry)
    assert after[audit.SKIPPED.name, "memory"] == 3
    assert after[audit.TOKENS.name, None] == 256
    assert after[audit.LIMIT.name, None] == 0.2
    assert (after[audit.SUSPENDED.name, "changed"], after[audit.SUSPENDED.name, "plain"]) == (2, 0)
    assert (after[f"{audit.KL.name}_count", "plain"], after[f"{audit.KL.name}_count", "changed"]) == (1, 0)
    assert (buckets(registry, "0.01"), buckets(registry, "0.03")) == (0, 1)
