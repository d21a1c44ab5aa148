"""Makes the Grafana board of `board.toml`; `python -m pic_bench.pages.reference` writes it beside the pages.

The board asks for its data source, and filters by model and server. A panel describes its metrics in the words in which
they are declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

import sglang_pic
from sglang_pic.adapter.metrics import Metric

FILE: Final = Path(sglang_pic.__file__).parent / "monitoring" / "grafana" / "sglang-pic.json"
_PANEL_HEIGHT: Final = 8
_STAT_HEIGHT: Final = 4
_COLUMNS: Final = 24
_FILTERS: Final = 'model_name=~"$model", instance=~"$instance"'
_NAME: Final = re.compile(r"(sglang:\w+)(?:\{(.*?)\})?")
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


class Panel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One panel; its fields are explained in `board.toml`."""

    title: str
    queries: dict[str, str]
    kind: str = "lines"
    unit: str = "none"
    width: int = 8
    about: str = ""
    states: dict[str, tuple[str, str]] = {}
    otherwise: str = msgspec.field(name="else", default="green")
    """The colour of a number that `states` does not name."""
    limits: dict[str, str] = {}
    """Colours by the number from which on they hold."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The panels that answer one question."""

    title: str
    panel: list[Panel]


def read_rows() -> list[Row]:
    """The rows of `board.toml`."""
    return msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, list[Row]])["row"]


def names_in(query: str) -> set[str]:
    """The series that a query reads."""
    return {found[1] for found in _NAME.finditer(query)}


def render(metrics: Iterable[Metric]) -> str:
    """The board as Grafana imports it.

    Args:
        metrics: whose descriptions the panels show.
    """
    helps = {metric.name: metric.help for metric in metrics}
    board = {
        "uid": "sglang-pic",
        "title": "SGLang: position-independent KV reuse",
        "tags": ["sglang"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels(read_rows(), helps)),
    }
    return msgspec.json.format(msgspec.json.encode(board), indent=2).decode() + "\n"


def _variables() -> list[dict[str, Any]]:
    shared = {"type": "query", "datasource": _SOURCE, "includeAll": True, "multi": True, "refresh": 2}
    shared |= {"current": {"text": "All", "value": "$__all"}}
    prompts = "sglang:pic_prompt_tokens_total"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {"name": "model", "label": "Model", "query": f"label_values({prompts}, model_name)"} | shared,
        {"name": "instance", "label": "Server", "query": f'label_values({prompts}{{model_name=~"$model"}}, instance)'}
        | shared,
    ]


def _panels(rows: Sequence[Row], helps: dict[str, str]) -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
        left, top = 0, top + 1
        for panel in row.panel:
            number += 1
            height = _STAT_HEIGHT if panel.kind == "stat" else _PANEL_HEIGHT
            if left + panel.width > _COLUMNS:
                left, top = 0, top + height
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            yield {"id": number, "gridPos": place} | _panel(panel, helps)
            left += panel.width
        top += height


def _panel(panel: Panel, helps: dict[str, str]) -> dict[str, Any]:
    names = dict.fromkeys(name for query in panel.queries.values() for name in sorted(names_in(query)))
    described = dict.fromkeys(helps[base] for name in names if (base := name.removesuffix("_bucket")) in helps)
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "legendFormat": legend, "expr": _filtered(query)}
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "stat" if panel.kind == "stat" else "timeseries",
        "title": panel.title,
        "description": "\n\n".join(text for text in (panel.about, *described) if text),
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0} | _look(panel), "overrides": []},
        "options": _options(panel),
    }


def _filtered(query: str) -> str:
    return _NAME.sub(lambda found: f"{found[1]}{{{', '.join(filter(None, (found[2], _FILTERS)))}}}", query)


def _look(panel: Panel) -> dict[str, Any]:
    if panel.kind != "stat":
        stacked = {"fillOpacity": 60, "stacking": {"mode": "percent", "group": "A"}}
        return {"custom": {"lineWidth": 1, "showPoints": "never"} | (stacked if panel.kind == "shares" else {})}
    states = {number: {"text": text, "color": color} for number, (text, color) in panel.states.items()}
    steps = [{"value": float(limit) or None, "color": color} for limit, color in panel.limits.items()]
    return {
        "mappings": [{"type": "value", "options": states}] if states else [],
        "thresholds": {"mode": "absolute", "steps": steps or [{"value": None, "color": panel.otherwise}]},
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "none"}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
