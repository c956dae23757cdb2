"""Text from elsewhere, made fit for a terminal or a log: what would move the cursor, hide, reorder or forge is shown.

A name, a reason or an exception's text may come from another process, from a file or from the user's code. `ESC[2J`
would clear the screen, a newline would begin a log line of its own, and a bidi override would show a name backwards.
"""

import re

MOST = 20_000  # characters of a text that are shown

# Control characters but for tab and newline, invisible and reordering ones, and halves of surrogate pairs.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def printable(text: str, most: int = MOST) -> str:
    r"""Return `text`, cut after `most` characters, with harmful characters escaped as in a Python literal.

    Line breaks stay, `"\r\n"` as `"\n"`.
    """
    return _HARMFUL.sub(_escaped, bounded(text, most).replace("\r\n", "\n"))


def bounded(text: str, most: int = MOST) -> str:
    """Return `text`, cut after `most` characters.

    The cut comes before all that takes time for each character: the text of an exception may have millions, and the
    process that escapes them is silent for longer than a lease.
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} characters more)"


def printable_line(text: str, most: int = MOST) -> str:
    """Return `text` as `printable` does, in one line: newlines and tabs are escaped too."""
    return printable(text, most).replace("\n", "\\n").replace("\t", "\\t")


def is_utf8(text: str) -> bool:
    """Return True if messages and records can hold `text`: a path with bytes that are not UTF-8 has half surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
