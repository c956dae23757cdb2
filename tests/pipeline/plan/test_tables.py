"""Nested tables as one list of keys, and on which line of a plan file a key stands."""

import pytest

from stageline.pipeline.plan.tables import canonical, flat, lines_of, place


def test_nested_tables_become_dotted_keys_and_an_empty_table_is_a_value() -> None:
    assert flat({"run": {"seed": 3}, "model": {"options": {}}}) == {"run.seed": 3, "model.options": {}}


def test_a_name_that_holds_a_dot_is_quoted() -> None:
    assert flat({"a": {"b.c": 1}}) == {'a."b.c"': 1}
    assert flat({"a": {"b": {"c": 1}}}) == {"a.b.c": 1}


def test_values_have_one_spelling() -> None:
    assert canonical({"b": 1, "a": [1.0, True]}) == '{"a":[1.0,true],"b":1}'


TEXT = """\
# a comment with a = sign
[run]
seed = 3

[model.options]  # a table inside a table
sizes = [
    1,
]
"quoted" = 1
nested.key = 2
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("run",), 2),
        (("run", "seed"), 3),
        (("model", "options"), 5),
        (("model", "options", "sizes"), 6),
        (("model", "options", "quoted"), 9),
        (("model", "options", "nested", "key"), 10),
    ],
)
def test_a_key_has_the_line_on_which_it_begins(key: tuple[str, ...], line: int) -> None:
    assert lines_of(TEXT)[key] == line


def test_a_key_without_a_line_is_placed_at_the_innermost_table_around_it() -> None:
    lines = lines_of(TEXT)
    assert place("stageline.toml", lines, ("run", "steps")) == "stageline.toml:2"
    assert place("stageline.toml", lines, ("data", "source")) == "stageline.toml"
