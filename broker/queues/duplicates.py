"""What has been accepted of a queue, so that a message that comes again can be compared with itself."""

from collections.abc import Hashable

from stageline.broker.errors import Disagreement

from .base import QueueKey

REMEMBERED = 4096  # messages


class Duplicates:
    """Fingerprints of the messages accepted last."""

    def __init__(self, key: QueueKey) -> None:
        self._key = key
        self._marks: dict[int, Hashable] = {}

    def compare(self, number: int, marks: Hashable) -> None:
        """Remembers `marks` of message `number`. Raises `Disagreement` if it had others before."""
        if self._marks.setdefault(number, marks) != marks:
            raise Disagreement(
                f"message {number} of {self._key} came twice with different bits: what computed it was not "
                "deterministic. See that all operations are, and that software, hardware type and thread count are "
                "the same wherever the stage runs"
            )
        if len(self._marks) > REMEMBERED:
            del self._marks[next(iter(self._marks))]
