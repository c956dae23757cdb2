"""The published schemas of what commands print with --json are those of the classes that the answers are made of."""

from collections.abc import Iterator

import click
import jsonschema
import pytest

from stageline.workers.cli.app import stageline
from stageline.workers.cli.schemas import SCHEMAS, file_name, schema_of, text_of
from support.paths import DOCS


def with_json(group: click.Group = stageline, before: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the words of each command that has the option --json."""
    context = click.Context(group)
    for name, found in ((each, group.get_command(context, each)) for each in group.list_commands(context)):
        assert found is not None
        if isinstance(found, click.Group):
            yield from with_json(found, (*before, name))
        elif any("--json" in each.opts for each in found.params):
            yield " ".join((*before, name))


def test_every_command_with_json_and_no_other_has_a_published_schema():
    """The answers of `metrics`, `plan`, `eval` and others had a schema's name, and no schema."""
    assert set(with_json()) == {command for each in SCHEMAS.values() for command in each.commands}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_page_of_the_commands_links_to_a_schema(name):
    assert f"[`{name}`](../schemas/{file_name(name)})" in (DOCS / "reference" / "commands.md").read_text()


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_published_schema_is_the_present_one(name):
    command = "python -m stageline.workers.cli.schemas docs/schemas"
    assert (DOCS / "schemas" / file_name(name)).read_text() == text_of(name), command
    jsonschema.Draft202012Validator.check_schema(schema_of(name))


def test_no_schema_is_published_that_no_answer_has():
    assert {file.name for file in (DOCS / "schemas").iterdir()} == set(map(file_name, SCHEMAS))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_takes_no_unknown_key_anywhere(name):
    schema = schema_of(name)
    objects = [schema, *(each for each in schema.get("$defs", {}).values() if "properties" in each)]
    assert all(each["additionalProperties"] is False for each in objects)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_a_class_says_of_its_attributes_stands_in_their_places(name):
    text = text_of(name)
    assert "Attributes:" not in text
    assert '"description"' in text
