"""The newest lines that this process has logged, kept for `stageline logs` on another machine than the process.

A log is a file of the process, or what its terminal shows. The broker can ask for the lines that are kept here. They
have no tracebacks, since those show code; and none are told where texts of exceptions must stay with the workers.
"""

import threading
from collections import deque

from stageline.broker.control.log_answer import LONGEST_LINE, MOST_LINES, KeptLine, KeptLines
from stageline.broker.control.peek import LONGEST_REFUSAL, Peeked, ShowLog

KEPT = 1000  # lines
_CUT = "..."


class KeptLog:
    """The newest lines that were logged, numbered from the first one on. Safe in any thread and in signal handlers."""

    def __init__(self) -> None:
        """Begin without a line."""
        self._lines: deque[KeptLine] = deque(maxlen=KEPT)
        self._end = 0
        self._lock = threading.RLock()  # a signal handler may log while its thread does

    def note(self, time: float, level: str, text: str) -> None:
        """Keep a line, cut to `LONGEST_LINE` characters.

        Args:
            time: When it was logged, in seconds since the epoch.
            level: Level, such as "info".
            text: The line; further lines of it follow the first.
        """
        cut = text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - len(_CUT)] + _CUT
        with self._lock:
            self._lines.append(KeptLine(time=time, level=level, text=cut))
            self._end += 1

    def clear(self) -> None:
        """Forget all lines: a process that was forked has not logged them."""
        with self._lock:
            self._lines.clear()
            self._end = 0

    def since(self, start: int) -> KeptLines:
        """Return the oldest kept lines from number `start` on, `MOST_LINES` at most."""
        with self._lock:
            lines, oldest = list(self._lines), self._end - len(self._lines)
        first = max(start, oldest)
        return KeptLines(first=first, lines=lines[first - oldest :][:MOST_LINES])


LOGGED = KeptLog()  # of this process


def shown_log(request: ShowLog, withheld: str) -> Peeked:
    """Return the lines that this process has logged, without the incarnation; a refusal if they are `withheld`."""
    if withheld:
        refusal = f"the log stays with the worker: {withheld}"
        return Peeked(0, request.id, refusal=refusal[:LONGEST_REFUSAL])
    return Peeked(0, request.id, log=LOGGED.since(request.start))
