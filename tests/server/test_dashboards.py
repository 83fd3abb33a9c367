"""The dashboard and the alert rules name metrics and labels that a server exports."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARD = CONFIGS / "grafana" / "jaxserve.json"
PROMETHEUS = CONFIGS / "prometheus" / "prometheus.yml"
ADDED_BY_PROMETHEUS = {"instance", "job"}


def expressions():
    """Every query of the dashboard and the rules, by where it stands."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    }
    variables = dashboard["templating"]["list"]
    found["variables"] = [each["query"]["query"] for each in variables if each["type"] == "query"]
    for file in yaml.safe_load(PROMETHEUS.read_text())["rule_files"]:
        for group in yaml.safe_load((PROMETHEUS.parent / file).read_text())["groups"]:
            found |= {rule["alert"]: [rule["expr"]] for rule in group["rules"]}
    return [(place, expr) for place, exprs in found.items() for expr in exprs]


@pytest.fixture(scope="module")
def exported(tiny_server):
    """Labels and their values of each sample that a server exports once it has served, by name."""
    with tiny_server.client() as client:
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        text = client.get("/metrics").text
    labels = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            of_name = labels.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                of_name.setdefault(label, set()).add(value)
    return labels


def test_every_metric_and_label_of_a_query_is_exported(exported):
    for place, expr in expressions():
        names = re.findall(r"jaxserve:\w+", expr)
        assert names or "up{" in expr, f"{place} asks for no metric of the server: {expr}"
        for name in names:
            assert name in exported, f"{place} asks for {name}"
        for name, selector in re.findall(r"(jaxserve:\w+)\{([^}]*)\}", expr):
            for label, kind, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector):
                assert label in exported[name].keys() | ADDED_BY_PROMETHEUS, f"{place}: {name} has no label {label}"
                if not value.startswith("$"):
                    pattern = re.compile(value if kind == "=~" else re.escape(value))
                    assert any(map(pattern.fullmatch, exported[name][label])), f"{place}: no {name} has {label} {value}"


def test_every_exported_metric_is_on_the_dashboard(exported):
    shown = {name for _, expr in expressions() for name in re.findall(r"jaxserve:\w+", expr)}
    for name in exported:
        if name.endswith("_created"):
            continue
        stem = re.sub(r"_(bucket|sum|count)$", "", name)
        assert any(other in (name, stem) or other.startswith(f"{stem}_") for other in shown), name


def test_the_dashboards_panels_have_their_own_places():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for index, a in enumerate(places):
        assert a["x"] + a["w"] <= 24
        for b in places[index + 1 :]:
            apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


def test_each_alert_says_what_is_wrong():
    for file in yaml.safe_load(PROMETHEUS.read_text())["rule_files"]:
        for group in yaml.safe_load((PROMETHEUS.parent / file).read_text())["groups"]:
            for rule in group["rules"]:
                assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]
