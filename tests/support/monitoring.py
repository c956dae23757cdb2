"""Questions of docker/monitoring to Prometheus: the expressions of its alerts and its dashboard."""

import json
from collections.abc import Iterator
from typing import Any

import yaml

from support.paths import ROOT

MONITORING = ROOT / "docker/monitoring"


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "stageline.json").read_text())
    return found


def shown() -> Iterator[tuple[str, str]]:
    """Every expression with its name: of alerts, of panels, of marks in them."""
    yield from ((rule["alert"], rule["expr"]) for rule in rules())
    for panel in dashboard()["panels"]:
        yield from ((f"{panel['title']} {each['refId']}", each["expr"]) for each in panel.get("targets", []))
    yield from ((each["name"], each["expr"]) for each in dashboard()["annotations"]["list"])


EXPRESSIONS = dict(shown())
