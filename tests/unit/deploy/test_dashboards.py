"""Every query of the dashboard and of the alerts is PromQL and asks for metrics that a gateway exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from broker.gateway.metrics import exported_names
from tests.unit.deploy.commands import ROOT

DASHBOARD = json.loads((ROOT / "ops/dashboards/prism.json").read_text())
ALERTS = yaml.safe_load((ROOT / "ops/dashboards/alerts.yaml").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
OF_EACH_GATEWAY = re.compile(r"_bucket$|open_streams|http_requests|stream_replays|broker_up")
"""Metrics that differ between gateways; all others are the broker's, the same at each."""
LABELS = {"le", "job", "instance", "state", "priority", "phase", "status", "route", "method", "why", "worker", "model"}
LABELS |= {"finished_reason"}


def queries() -> Iterator[Any]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield pytest.param(target["expr"].replace("$__rate_interval", "5m"), id=panel["title"])
    for rule in RULES:
        yield pytest.param(rule["expr"], id=rule["alert"])


def selectors(expression: Any) -> Iterator[Any]:
    """All vector selectors of a parsed query."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("vector_selector", "expr", "lhs", "rhs", "param"):
        part = getattr(expression, name, None)
        if part is not None and not isinstance(part, str):
            yield from selectors(part)
    for part in getattr(expression, "args", None) or ():
        yield from selectors(part)


def names(query: str) -> set[str]:
    found = {selector.name for selector in selectors(promql_parser.parse(query))}
    assert found == set(re.findall(r"prism_\w+", query)), "the walk over the query missed a selector"
    return found


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_asks_for_exported_metrics_by_known_labels(query: str) -> None:
    assert names(query) <= exported_names()
    for selector in selectors(promql_parser.parse(query)):
        assert {matcher.name for matcher in selector.matchers.matchers} <= LABELS
    assert set(re.findall(r"\bby \(([^)]*)\)", query)) <= LABELS | {"le, phase"}


@pytest.mark.parametrize("query", list(queries()))
def test_numbers_of_the_broker_are_joined_by_max_and_those_of_a_gateway_by_sum(query: str) -> None:
    """Two gateways would otherwise show twice the tokens, or half of the streams."""
    for name in names(query):
        if "broker_up" in name:
            assert re.search(r"\bmin ?\(", query)
        elif OF_EACH_GATEWAY.search(name):
            assert re.search(rf"\bsum( by \([^)]*\))? ?\(((rate|increase)\()?{name}\b", query), (name, query)
        else:
            assert re.search(rf"\bmax( by \([^)]*\))? ?\(((rate|increase)\()?{name}\b", query), (name, query)


def test_every_family_of_metrics_is_shown_somewhere() -> None:
    shown = {name for param in queries() for name in names(param.values[0])}
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported_names()}
    missing = families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name in missing if not name.endswith("_created")} <= {
        "prism_stream_replays",
        "prism_http_requests",
    }


def test_the_dashboard_is_one_that_grafana_can_place() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert DASHBOARD["uid"]
    assert DASHBOARD["schemaVersion"] >= 36
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == variables
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_every_alert_says_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "action"}
