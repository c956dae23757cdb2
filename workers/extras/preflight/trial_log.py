"""Reads the log of a trial: what the user's code has printed, what the trial does, and its result."""

from collections.abc import Callable
from contextlib import suppress

import msgspec

from .trial_result import ChosenMemory, MeasuredCut, MeasuredLayers, TrialRefusal, TriedPlan

_Result = TriedPlan | MeasuredCut | ChosenMemory | MeasuredLayers | TrialRefusal

DOING, RESULT = "doing", "result"  # the words of a trial's own lines


class TrialLog:
    """The log of a trial that writes `mark` before its own lines. `printed` is called with what the user's code prints.

    `read(offset)` gives the bytes that the log has from there on.
    """

    def __init__(self, mark: str, read: Callable[[int], bytes], printed: Callable[[bytes], None]) -> None:
        self.doing = "its start"
        self.result: _Result | None = None
        self._begin = f"{mark} ".encode()
        self._read = read
        self._printed = printed
        self._offset = 0
        self._rest = b""  # what was read and may be the beginning of one of the trial's lines

    def follow(self) -> None:
        """Takes note of what has been added; after the result, nothing is of interest."""
        if self.result is not None:
            return
        new = self._read(self._offset)
        self._offset += len(new)
        self._rest += new
        while (start := self._rest.find(self._begin)) >= 0:
            end = self._rest.find(b"\n", start + len(self._begin))
            if end < 0:
                break
            self._print(start)
            line, self._rest = self._rest[: end - start], self._rest[end - start + 1 :]
            if self._note(line.removeprefix(self._begin)):
                return
        self._print(self._printable())

    def _printable(self) -> int:
        """How many bytes of the rest cannot be part of one of the trial's lines."""
        if (start := self._rest.find(self._begin)) >= 0:
            return start
        tails = range(max(0, len(self._rest) - len(self._begin)), len(self._rest))
        return next((place for place in tails if self._begin.startswith(self._rest[place:])), len(self._rest))

    def _print(self, count: int) -> None:
        if count:
            self._printed(self._rest[:count])
        self._rest = self._rest[count:]

    def _note(self, line: bytes) -> bool:
        """Whether it is the result."""
        word, _, content = line.partition(b" ")
        if word == RESULT.encode():
            with suppress(msgspec.MsgspecError):  # then there is none
                self.result = msgspec.json.decode(content, type=_Result)
            return True
        self.doing = content.decode(errors="replace")
        return False
