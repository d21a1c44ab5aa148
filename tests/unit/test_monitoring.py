"""The board and the rules read metrics that exist, their PromQL parses, and alerts are raised when they should be."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", reason="the list of metrics is read from the adapter")
from sglang_pic.monitoring import board
from sglang_pic.reference import METRICS

FOLDER = Path(board.__file__).parent
RULES = FOLDER / "rules.yaml"
DECLARED = {metric.name: metric for metric in METRICS}
OF_SGLANG = {"sglang:time_to_first_token", "sglang:num_queue_reqs"}


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
    panels = json.loads(board.FILE.read_text())["panels"]
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
        if base.removesuffix("_seconds") in OF_SGLANG:
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


def test_the_board_is_what_the_code_gives() -> None:
    assert board.render(METRICS) == board.FILE.read_text(), "run `make reference`"


def test_each_alert_has_its_place_in_the_runbook() -> None:
    headings = re.findall(r"^## (\w+)$", (FOLDER.parent / "RUNBOOK.md").read_text(), re.MULTILINE)
    alerts = [rule for rule in rules() if "alert" in rule]
    assert [rule["alert"] for rule in alerts] == headings
    assert all(
        rule["annotations"]["runbook"] == f"sglang_pic/RUNBOOK.md#{rule['alert'].lower()}"  # type: ignore[index]
        for rule in alerts
    )


def test_prometheus_reads_rules_and_every_query_of_the_board(tmp_path: Path) -> None:
    for name in ("prometheus.yaml", "rules.yaml"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    promtool("check", "config", tmp_path / "prometheus.yaml")
    queries = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(shown_queries())]
    (tmp_path / "board.yaml").write_text(json.dumps({"groups": [{"name": "board", "rules": queries}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", tmp_path / "board.yaml")


def test_alerts_are_raised_and_not_without_need(tmp_path: Path) -> None:
    cases = Path(__file__).with_name("rules_test.yaml").read_text()
    (tmp_path / "tests.yaml").write_text(cases.replace("[RULES]", json.dumps([str(RULES)])))
    promtool("test", "rules", tmp_path / "tests.yaml")
