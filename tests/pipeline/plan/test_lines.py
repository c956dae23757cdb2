"""On which line of a plan file a key stands."""

import pytest

from stageline.pipeline.plan.lines import lines_of, place

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
