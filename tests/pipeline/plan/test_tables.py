"""Nested tables as one list of keys."""

from stageline.pipeline.plan.tables import canonical, flat


def test_nested_tables_become_dotted_keys_and_an_empty_table_is_a_value() -> None:
    assert flat({"run": {"seed": 3}, "model": {"options": {}}}) == {"run.seed": 3, "model.options": {}}


def test_a_name_that_holds_a_dot_is_quoted() -> None:
    assert flat({"a": {"b.c": 1}}) == {'a."b.c"': 1}
    assert flat({"a": {"b": {"c": 1}}}) == {"a.b.c": 1}


def test_values_have_one_spelling() -> None:
    assert canonical({"b": 1, "a": [1.0, True]}) == '{"a":[1.0,true],"b":1}'
