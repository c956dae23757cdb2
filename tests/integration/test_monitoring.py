"""The dashboard and the alerts in docker/monitoring ask for series that are there, by labels that they have."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from stageline.workers.cli.monitoring.scraping import surroundings
from stageline.workers.runs.series import SeriesFamily, families
from support.measured import measures
from support.monitoring import EXPRESSIONS, MONITORING, dashboard, rules
from support.paths import DOCS, ROOT

TARGET = {"instance", "job"}  # labels that Prometheus adds
FUNCTIONS = {"rate", "increase", "changes", "time", "predict_linear", "histogram_quantile", "sum"} | {
    "max_over_time",
    "last_over_time",
}
READ_WHOLE = {"stageline_worker_losses_total", "stageline_recoveries_total"}  # counters whose value itself is shown
WORDS = {"by", "and", "or", "on", "ignoring", "unless", "up"}
_SELECTOR = re.compile(r"\b(stageline_\w+)(?:\{([^}]*)\})?(\[\d+[smhd]\])?")
_MATCHER = re.compile(r'(\w+)(?:=|!=|=~|!~)"[^"]*"')
_GROUPING = re.compile(r"\b(?:by|on|ignoring) ?\(([^)]*)\)")


def exported() -> dict[str, set[str]]:
    """The labels of every series by the name under which it is scraped."""
    found: dict[str, set[str]] = {}
    for family in (*families(measures()), *surroundings(Path("."))):
        labels = {name for sample in family.samples for name in sample.labels}
        for part in ("_bucket", "_sum", "_count") if family.buckets else ("",):
            found[f"{family.shown}{part}"] = labels | ({"le"} if part == "_bucket" else set())
    return found


EXPORTED = exported()


def wrong(expression: str) -> Iterator[str]:
    """Yield what is wrong with an expression."""
    for name, matchers, over in _SELECTOR.findall(expression):
        if name not in EXPORTED:
            yield f"nothing exports {name}"
            continue
        yield from (
            f"{name} has no {each}" for each in _MATCHER.findall(matchers) if each not in EXPORTED[name] | TARGET
        )
        if name.endswith("_total") and not over and name not in READ_WHOLE:
            yield f"{name} is a counter, without rate or increase"
    named = {label for names in _GROUPING.findall(expression) for label in re.split(r"\s*,\s*", names) if label}
    known = TARGET.union(*(EXPORTED.get(name, set()) for name, *_ in _SELECTOR.findall(expression)))
    yield from (f"no series has the label {each}" for each in named - known)
    if expression.count("(") != expression.count(")") or expression.count("{") != expression.count("}"):
        yield "brackets do not match"
    plain = _GROUPING.sub("by", _SELECTOR.sub("", re.sub(r'"[^"]*"', "", expression)))
    yield from (f"{word} is unknown" for word in set(re.findall(r"[a-z_]{2,}", plain)) - FUNCTIONS - WORDS)


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_asks_for_series_and_labels_that_are_there(expression: str) -> None:
    assert not list(wrong(expression))
    assert _SELECTOR.search(expression)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("stageline_bogus == 1", "nothing exports stageline_bogus"),
        ('stageline_loss{queue="a"}', "stageline_loss has no queue"),
        ("rate(stageline_steps_total)", "without rate or increase"),
        ("sum by (color) (rate(stageline_steps_total[5m]))", "no series has the label color"),
        ("rate(stageline_steps_total[5m]", "brackets do not match"),
        ("rat(stageline_steps_total[5m])", "rat is unknown"),
    ],
)
def test_an_expression_that_is_wrong_is_noticed(expression: str, said: str) -> None:
    assert any(said in each for each in wrong(expression))


def test_alerts_and_panels_have_names_of_their_own_and_say_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 6
    for rule in rules():
        assert {"summary", "description"} <= rule["annotations"].keys()
        labels = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert labels <= TARGET.union(*(EXPORTED[name] for name, *_ in _SELECTOR.findall(rule["expr"])))
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["description"].endswith(".") for panel in panels)
    for panel in panels:
        labels = set(re.findall(r"\{\{(\w+)\}\}", " ".join(each["legendFormat"] for each in panel["targets"])))
        names = [name for each in panel["targets"] for name, *_ in _SELECTOR.findall(each["expr"])]
        assert labels <= set().union(*(EXPORTED[name] for name in names))


def test_the_guide_names_every_series_and_alert_and_no_other() -> None:
    page = (DOCS / "guides/metrics.md").read_text()
    names = {family.shown for family in (*families(measures()), *surroundings(Path(".")))}
    assert set(re.findall(r"`(stageline_\w+)`", page)) == names
    assert set(re.findall(r"`(Stageline\w+)`", page)) == {rule["alert"] for rule in rules()}
    causes = {each["cause"] for family in families(measures()) for each in labels_of(family) if "cause" in each}
    assert all(f"`{cause}`" in page for cause in causes)


def labels_of(family: SeriesFamily) -> list[Mapping[str, str]]:
    return [sample.labels for sample in family.samples]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_compose_file_mounts_files_that_are_there_and_scrapes_the_broker() -> None:
    over = yaml.safe_load((MONITORING / "compose.yaml").read_text())
    base = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    for service in over["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (ROOT / "docker" / source).is_file() or source in over["volumes"]
        assert set(service["networks"]) <= over["networks"].keys() | base["networks"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    broker = over["services"]["broker"]["command"]
    assert broker.startswith(base["services"]["broker"]["command"])
    assert over["services"]["broker"]["image"] != base["services"]["broker"]["image"]  # both are built at once
    assert "metrics" in over["services"]["broker"]["build"]["args"]["EXTRAS"].split(",")
    port = broker.rpartition(":")[2]
    (scraped,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"broker:{port}"]}]
    assert over["services"]["prometheus"]["networks"][0] in over["services"]["broker"]["networks"]
    source = yaml.safe_load((MONITORING / "datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
