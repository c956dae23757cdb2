"""The end of each log of a run, as far as stageline has written it: lines of the user's code are counted alone.

Lines with the time that stageline writes before them are its own, whatever they say. A log has events of stageline,
tracebacks, and what the user's code prints, which may be rows of data or secrets. Of a traceback, the places and the
exception stay, and no line of code, which may have a literal in it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

LONGEST = 256 * 1024  # bytes of a log's end
_EVENT = re.compile(r"\d\d:\d\d:\d\d [^\s].*|stageline: .*")
_PLACE = re.compile(r'\s*File "[^"]*", line \d+, in .*')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Warning|Interrupt|Exit|Stop\w*)(: .*)?")
_TRACEBACK = re.compile(
    r"\s*(Traceback \(most recent call last\):|During handling of the above exception.*|The above exception was .*)"
)


def end_of(path: Path, own_text: Callable[[str], str | None]) -> str:
    """Return the lines of stageline and of tracebacks in the last LONGEST bytes of a log.

    Args:
        path: The log.
        own_text: Returns a line without the time that stageline writes before it; None if it has none.

    Raises:
        OSError: The log cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LONGEST))
        content = file.read(LONGEST).decode("utf-8", "replace")
    lines = content.splitlines()
    begin = [f"[{size - LONGEST} bytes before]"] if size > LONGEST else []
    return "\n".join([*begin, *_kept(lines[1:] if size > LONGEST else lines, own_text)]) + "\n"


def _kept(lines: Iterable[str], own_text: Callable[[str], str | None]) -> Iterator[str]:
    left_out, within = 0, False  # a line that is indented goes with the event before it
    for line in lines:
        own = own_text(line)
        text = line if own is None else own
        error = any(each.fullmatch(text) for each in (_PLACE, _EXCEPTION, _TRACEBACK))  # code follows: no event
        event = not error and (own is not None or bool(_EVENT.fullmatch(text)))
        known = event or error
        if known or (within and line.startswith("    ")):
            if left_out:
                yield f"[{left_out} lines of other origin]"
            left_out, within = 0, event or (within and not known)
            yield line
        else:
            left_out, within = left_out + 1, False
    if left_out:
        yield f"[{left_out} lines of other origin]"
