"""The dashboards show every declared metric, and use no other."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rlsrl.runtime.metrics import Metrics
from rlsrl_operator.metrics import OperatorMetrics

FOLDER = Path(__file__).parents[3] / "charts" / "dashboards"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
NOT_SHOWN = {
    "process_virtual_memory_bytes": "address space costs nothing; resident memory is shown",
    "process_start_time_seconds": "joins and attempts show restarts; it tells the dashboards which roles there are",
}
"""Metrics without a panel, and the reason."""


def queries(dashboard: str) -> list[tuple[str, str]]:
    """Yield panel titles and their queries."""
    return [
        (panel["title"], target["expr"])
        for panel in DASHBOARDS[dashboard]["panels"]
        for target in panel.get("targets", ())
    ]


def names(expression: str, declared: set[str]) -> set[str]:
    """Return the metrics in an expression; for a histogram's series the histogram's name."""
    found = re.findall(r"\b((?:rlsrl|process)_[a-z_]+)\{", expression)
    return {name if name in declared else re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def of_workers() -> set[str]:
    registry = CollectorRegistry()
    Metrics(registry)
    return {each.name for each in Metrics.declared()} | process(registry)


def of_the_operator() -> set[str]:
    families = OperatorMetrics(CollectorRegistry()).registry.collect()
    return {f"{each.name}_total" if each.type == "counter" else each.name for each in families}


def process(registry: CollectorRegistry) -> set[str]:
    return {f"{each.name}_total" if each.type == "counter" else each.name for each in registry.collect()}


@pytest.mark.parametrize(("dashboard", "declared"), [("experiment", of_workers()), ("operator", of_the_operator())])
def test_every_metric_is_in_a_panel_or_listed_as_absent(dashboard: str, declared: set[str]) -> None:
    asked = set().union(*(names(expression, declared) for _, expression in queries(dashboard)))
    assert asked <= declared, "these do not exist"
    assert not declared - asked - set(NOT_SHOWN), "put them into a panel, or say why not"
    assert not asked & set(NOT_SHOWN)


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_panels_say_what_they_show_and_do_not_overlap(dashboard: str) -> None:
    panels = DASHBOARDS[dashboard]["panels"]
    assert Counter(panel["id"] for panel in panels).most_common(1)[0][1] == 1
    taken: Counter[tuple[int, int]] = Counter()
    for panel in panels:
        place = panel["gridPos"]
        taken.update((place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"]))
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["targets"]
    assert taken.most_common(1)[0][1] == 1
    assert max(x for x, _ in taken) == 23


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_variables_are_used_and_defined(dashboard: str) -> None:
    text = json.dumps([queries(dashboard), DASHBOARDS[dashboard]["templating"]])
    defined: dict[str, Any] = {each["name"]: each for each in DASHBOARDS[dashboard]["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval", "__all"}
    assert used | {"datasource"} == set(defined)
    assert DASHBOARDS[dashboard]["uid"] == f"rlsrl-{dashboard}"


def test_experiments_are_chosen_by_namespace_name_and_role() -> None:
    assert [each["name"] for each in DASHBOARDS["experiment"]["templating"]["list"]][1:] == [
        "namespace",
        "experiment",
        "role",
    ]
    for title, expression in queries("experiment"):
        selectors = re.findall(r"\{([^}]*)\}", expression)
        assert selectors, title
        for each in selectors:
            assert 'namespace=~"$namespace", experiment=~"$experiment"' in each, title
