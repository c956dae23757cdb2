"""Text from elsewhere, as a terminal shows it."""

import pytest

from stageline.pipeline.printable import MOST, printable, printable_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("worker-0", "worker-0"),
        ("größer → 模型 🙂", "größer → 模型 🙂"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\x08c\x00", "a\\x0db\\x08c\\x00"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("a\u200bb\ufeff\u2028", "a\\u200bb\\ufeff\\u2028"),
        ("\udc80", "\\udc80"),
        ("two\nlines\r\nand\ta tab", "two\nlines\nand\ta tab"),
    ],
)
def test_what_controls_a_terminal_is_shown_and_all_else_stays(text: str, shown: str) -> None:
    assert printable(text) == shown
    printable(text).encode()


def test_a_line_stays_one_line() -> None:
    assert printable_line("fine\n00:00:00 assigned: forged\tx") == "fine\\n00:00:00 assigned: forged\\tx"


def test_what_is_too_long_is_cut_and_says_so() -> None:
    assert printable("x" * MOST) == "x" * MOST
    assert printable("x" * (MOST + 7)) == "x" * MOST + "... (7 characters more)"
    assert printable("x" * 10, most=3) == "xxx... (7 characters more)"


def test_a_long_text_is_cut_before_it_is_escaped() -> None:
    """To escape the 50 MB of an exception's text took longer than a lease, and its worker was taken for hung."""
    assert printable("\x1b" * 10, most=3) == "\\x1b\\x1b\\x1b... (7 characters more)"
