"""Errors of the user's code are described with the line that raised them."""

import importlib
import os
from pathlib import Path

import pytest
import torch

from stageline.pipeline.data import Rows
from stageline.pipeline.errors import (
    LONGEST_TEXT,
    DataError,
    ModelRefused,
    describe_error,
    documented,
    error_text,
    failure_code,
    traceback_text,
)
from stageline.pipeline.model.load import load_object
from stageline.pipeline.retry import causes, lacks_memory, passing_fault


def test_an_error_is_described_with_its_file_and_line():
    with pytest.raises(ValueError, match="seven") as caught:
        int("seven")
    place = f"{__file__}, line {caught.tb.tb_lineno}, in test_an_error_is_described_with_its_file_and_line"
    assert describe_error(caught.value) == f"ValueError: invalid literal for int() with base 10: 'seven' ({place})"


def test_a_received_exit_code_is_a_documented_one_and_of_a_failure_never_0():
    assert [documented(code) for code in (0, 75, 78, 7, -9, 2**40)] == [0, 75, 78, 1, 1, 1]
    assert [failure_code(code) for code in (0, 75, 78, 7, -9, 2**40)] == [1, 75, 78, 1, 1, 1]


def test_an_error_that_was_never_raised_has_no_line():
    assert describe_error(KeyError("a")) == "KeyError: 'a'"


def test_not_a_line_of_stageline_or_of_a_library_is_shown_but_the_users_that_called_it():
    with pytest.raises(DataError) as ours:
        Rows(1, 2, batch_size=1, seed=0)
    with pytest.raises(ModuleNotFoundError) as frozen:
        importlib.import_module("no_such_package")
    with pytest.raises(TypeError) as librarys:
        torch.zeros("one")
    for caught in (ours, frozen, librarys):
        assert f"({__file__}, line {caught.tb.tb_lineno}, in test_not_a" in describe_error(caught.value)


def test_an_error_in_which_no_line_is_the_users_has_none():
    with pytest.raises(ModelRefused) as caught:
        load_object("no_such_package.build", Path(), "model.factory")
    cause = caught.value.__cause__
    assert cause is not None
    assert describe_error(cause) == error_text(cause)


def test_an_error_whose_text_cannot_be_made_is_told_all_the_same():
    """The user read of a bug in stageline."""

    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    assert error_text(Unprintable()) == "Unprintable: (its text cannot be made: RuntimeError)"


class Text(str):
    def __iter__(self):
        raise RuntimeError("not to be read")

    __format__ = __getitem__ = __len__ = __iter__


def raising(kind: type[BaseException]):
    def raises(*_: object):
        raise kind("odd")

    return raises


class Nameless(type):
    __name__ = property(raising(RuntimeError))  # type: ignore[assignment]


def odd(base: type[BaseException] = Exception, **attributes: object) -> type[BaseException]:
    return type("Odd", (base,), attributes)


HIDDEN = property(raising(KeyError))
ODD = {
    "a text that raises": lambda: odd(RuntimeError, __str__=raising(RuntimeError)),
    "a text that exits, and a hidden number": lambda: odd(OSError, __str__=raising(SystemExit), errno=HIDDEN),
    "a text that is a number": lambda: odd(__str__=lambda self: 3),
    "a text that is odd itself": lambda: odd(__str__=lambda self: Text("odd")),
    "a text that asks for itself": lambda: odd(__str__=lambda self: str(self)),
    "attributes that raise": lambda: odd(__getattribute__=raising(RuntimeError)),
    "attributes that exit": lambda: odd(RuntimeError, __getattribute__=raising(SystemExit)),
    "no truth and no equals": lambda: odd(__eq__=raising(RuntimeError), __bool__=raising(RuntimeError), __hash__=None),
    "a hidden cause": lambda: odd(__traceback__=HIDDEN, __cause__=HIDDEN, __context__=HIDDEN),
    "a hidden place": lambda: odd(SyntaxError, msg=HIDDEN, filename=HIDDEN),
    "a hidden name": lambda: Nameless("Odd", (Exception,), {}),
}


@pytest.mark.parametrize("what", ODD)
def test_an_error_of_a_class_that_misbehaves_is_described_and_sorted_like_any_other(what):
    """Each ended a run as a bug in stageline: the text was made, and then the cause or the number was asked for."""
    kind, found = ODD[what](), None
    try:
        raise kind from ValueError("behind it")
    except Exception as error:  # noqa: BLE001  # `pytest.raises` would ask it for its text
        found = error
    assert describe_error(found).startswith("Odd")
    assert f"({__file__}, line " in describe_error(found)
    assert list(map(type, causes(found))) == [kind, ValueError]
    assert passing_fault(found) is None
    assert not lacks_memory(found)
    assert "in test_an_error_of_a_class_that_misbehaves" in traceback_text(found)


def test_control_characters_of_an_error_do_not_reach_the_terminal():
    assert error_text(ValueError("a\x1b[2Jb\n\tc")) == "ValueError: a\\x1b[2Jb\n\tc"
    assert error_text(StopIteration()) == "StopIteration"


def test_the_text_of_an_error_is_cut_before_it_is_escaped():
    """To escape 50 MB took longer than a lease, so that the worker was taken for hung, and the error was lost."""
    text = "\\x1b" * LONGEST_TEXT
    assert error_text(ValueError("\x1b" * (LONGEST_TEXT + 7))) == f"ValueError: {text}... (7 characters more)"


def test_a_users_file_is_named_with_its_path_as_stageline_and_libraries_have_files_of_that_name(tmp_path):
    """A mistake was placed in "model.py, line 68": the user's own file, and one of stageline's, had that name."""
    (tmp_path / "errors.py").write_text("import torch\n\ndef build():\n    return torch.zeros(2) @ torch.zeros(3)\n")
    build = load_object("errors.py:build", tmp_path, "model.factory")
    with pytest.raises(RuntimeError) as caught:
        build()
    told = describe_error(caught.value)
    assert told.startswith("RuntimeError: inconsistent tensor size")
    assert told.endswith(f"({tmp_path / 'errors.py'}, line 4, in build)")


def test_a_syntax_error_is_placed_in_its_file_with_the_path(tmp_path):
    """Python's text has the file's name alone: "(helper.py, line 2)"."""
    (tmp_path / "neighbour_with_a_typo.py").write_text("x = 1\ny = = 2\n")
    (tmp_path / "model.py").write_text("\nimport neighbour_with_a_typo\n")
    with pytest.raises(ModelRefused) as caught:
        load_object("model.py:build", tmp_path, "model.factory")
    assert f"({tmp_path / 'neighbour_with_a_typo.py'}, line 2)" in str(caught.value)
    assert f"({tmp_path / 'model.py'}, line 2, in <module>)" in str(caught.value)


def test_generated_code_is_not_taken_for_the_users():
    """The place of an error was in a file "<string>"."""
    names: dict[str, object] = {}
    exec(compile("def generated(x): return x + 1", "<string>", "exec"), names)  # noqa: S102  # our own text
    generated = names["generated"]
    with pytest.raises(TypeError) as caught:
        generated("one")
    assert f"({__file__}, line {caught.tb.tb_lineno}, in test_generated" in describe_error(caught.value)


def test_a_place_in_a_file_whose_path_is_not_utf8_can_be_sent(tmp_path):
    """The message could not be written, and the reason was lost."""
    folder = tmp_path / os.fsdecode(b"net-\xff")
    folder.mkdir()
    (folder / "model.py").write_text("def build():\n    raise ValueError('no')\n")
    build = load_object("model.py:build", folder, "model.factory")
    with pytest.raises(ValueError, match="no") as caught:
        build()
    assert "net-\\udcff/model.py, line 2" in describe_error(caught.value)
    assert describe_error(caught.value).encode()
