"""The JSON schema of plan files: published, the same as what the command prints, and in agreement with the reader."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from stageline.pipeline.plan.keys.models import TABLES, plan_schema, section
from stageline.workers.cli.app import run
from support.paths import DOCS, EXAMPLES

PLANS = sorted(EXAMPLES.glob("*/stageline*.toml"))


def test_the_published_schema_is_what_the_command_prints(capsys):
    assert run(["plan", "--schema"]) == 0
    printed = capsys.readouterr().out
    assert (DOCS / "plan.schema.json").read_text() == printed, "stageline plan --schema > docs/plan.schema.json"
    jsonschema.Draft7Validator.check_schema(json.loads(printed))


def test_every_key_has_a_description_and_an_example_that_the_schema_accepts():
    schema = plan_schema()
    for table in TABLES:
        keys = schema["definitions"][section(table).__name__]["properties"]
        for key, described in keys.items():
            assert described["description"].endswith("."), f"{table}.{key}"
            for example in described["examples"]:
                jsonschema.validate(example, described)


def test_choices_and_defaults_are_those_of_the_plan():
    schedule = plan_schema()["definitions"]["SchedulePlan"]["properties"]
    assert set(schedule["mode"]["enum"]) == {"sync", "async"}
    assert schedule["mode"]["default"] == "sync"
    assert "1f1b" in schedule["name"]["anyOf"][0]["enum"]
    assert "default" not in schedule["window"]  # TOML has no null


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.parent.name}/{plan.name}")
def test_every_example_names_the_schema_and_agrees_with_it(plan: Path):
    first, _, _ = plan.read_text().partition("\n")
    assert first.startswith("#:schema ")
    assert (plan.parent / first.removeprefix("#:schema ")).resolve() == DOCS / "plan.schema.json"
    jsonschema.validate(tomllib.loads(plan.read_text()), plan_schema())


WRONG = [
    ("run", "sede", 1),
    ("run", "steps", "many"),
    ("run", "epochs", 0),
    ("model", "cut", "half"),
    ("model", "factory", "build"),
    ("schedule", "name", "1f1bb"),
    ("data", "batch_size", 1.5),
    ("recovery", "lease", []),
    ("workers", "0", {"device": "cpu"}),
    ("colour", "red", 1),
]


@pytest.mark.parametrize(("table", "key", "value"), WRONG)
def test_what_the_reader_refuses_of_a_key_the_schema_refuses_too(table: str, key: str, value: object):
    tables = tomllib.loads((EXAMPLES / "digits" / "stageline.toml").read_text())
    tables.setdefault(table, {})[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tables, plan_schema())
