"""Dashboards as Grafana's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from promql import Expression

Json = dict[str, Any]
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _PANEL_COLUMNS, _PANEL_HEIGHT = 24, 8, 8
_SCHEMA = 39


@dataclass(frozen=True)
class Line:
    """The line of one query."""

    expression: Expression
    legend: str


@dataclass(frozen=True)
class Panel:
    """Lines over time."""

    title: str
    unit: str
    """One of Grafana's units: ``short``, ``s``, ``percentunit``, ``bytes`` and so on."""
    lines: tuple[Line, ...]
    note: str = ""
    """A description beyond the metrics' own."""

    @property
    def description(self) -> str:
        """Return the descriptions of the metrics."""
        helps = dict.fromkeys(metric.help for line in self.lines for metric in line.expression.metrics)
        return " ".join(filter(None, (self.note, *helps)))


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A selection of the reader: values of a label."""

    name: str
    query: str


def dashboard(uid: str, title: str, description: str, variables: Sequence[Variable], rows: Sequence[Row]) -> Json:
    """Return a dashboard for import."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["rlsrl"],
        "schemaVersion": _SCHEMA,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), *map(_variable, variables)]},
        "panels": list(_laid_out(rows)),
    }


def _data_source() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _laid_out(rows: Sequence[Row]) -> Iterator[Json]:
    number = top = 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        top += 1
        left = 0
        for panel in row.panels:
            number += 1
            place = {"x": left, "y": top, "w": _PANEL_COLUMNS, "h": _PANEL_HEIGHT}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            left += _PANEL_COLUMNS
            if left == _COLUMNS:
                left, top = 0, top + _PANEL_HEIGHT
        top += _PANEL_HEIGHT if left else 0


def _panel(panel: Panel) -> Json:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": line.expression.text,
                "legendFormat": line.legend,
            }
            for number, line in enumerate(panel.lines)
        ],
    }
