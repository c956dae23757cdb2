"""The keys of a plan are those that docs/reference/plan.md describes."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from stageline.pipeline.plan import read_plan
from stageline.pipeline.plan.keys.models import TABLES, PlanTables, section
from stageline.pipeline.plan.tables import flat
from support.paths import DOCS, EXAMPLES
from support.small_plans import plan

MODELS = [(table, section(table)) for table in TABLES]


def documented() -> dict[str, str]:
    page = DOCS / "reference/plan.md"
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]+\| ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(rows)


def test_every_key_is_documented_and_nothing_else() -> None:
    keys = {f"{table}.{key}" for table, keys in MODELS for key in keys.model_fields}
    keys |= PlanTables.model_fields.keys() - {*TABLES}
    named = {"workers.": "workers.N.", "stage.": "stage.N.", "parties.": "parties.NAME."}
    for table, written in named.items():
        keys = {key.replace(table, written) for key in keys}
    assert documented().keys() == keys


def test_the_documented_defaults_are_the_defaults() -> None:
    defaults = {key.replace("workers.0", "workers.N"): value for key, value in flat(plan().as_mapping()).items()}
    written = {key: cell.strip("`") for key, cell in documented().items() if cell.startswith("`")}
    assert written["queues.retain_bytes"] == '"1GiB"'
    assert (written["recovery.lease"], written["recovery.loading"]) == ('"10s"', '"5min"')
    assert written["broker.patience"] == '"10min"'
    for key in written.keys() - {"queues.retain_bytes", "recovery.lease", "recovery.loading", "broker.patience"}:
        assert json.loads(written[key]) == defaults[key]


def test_what_is_documented_as_needed_is_needed() -> None:
    needed = {re.sub(r"\.N(AME)?\b", "", key) for key, cell in documented().items() if cell.startswith("needed")}
    fields = [(table, key, field) for table, keys in MODELS for key, field in keys.model_fields.items()]
    assert needed == {f"{table}.{key}" for table, key, field in fields if field.is_required()}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*/stageline.toml")))
def test_every_example_has_a_plan_without_warnings(example: Path) -> None:
    plan = read_plan(example)
    assert plan.warnings == ()
    assert all(before < after for before, after in pairwise(plan.model.cut or ()))
