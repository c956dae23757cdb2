"""Compares what the two ends of each queue report of its messages, step by step.

Only queues whose messages lie at a server have such reports: there another client can replace them.
"""

from collections.abc import Iterable

from stageline.broker.control.messages import StepDigest

REMEMBERED = 8192  # steps of each queue


class QueueDigests:
    """The digests of the newest steps of each queue, whichever end has reported one first.

    `differed`: True once those of both ends have differed.
    """

    def __init__(self) -> None:
        self.differed = False
        self._known: dict[str, dict[int, str]] = {}

    def differing(self, reported: Iterable[StepDigest]) -> tuple[str, int] | None:
        """Return the queue and the step of the first digest that is not the one reported before, None if all agree."""
        places = ((queue, step) for queue, step, digest in reported if not self._agrees(queue, step, digest))
        place = next(places, None)
        self.differed = self.differed or place is not None
        return place

    def clear(self) -> None:
        """Forget all digests: workers that keep running send theirs again, and others may put other messages."""
        self._known.clear()

    def _agrees(self, queue: str, step: int, digest: str) -> bool:
        known = self._known.setdefault(queue, {})
        agrees = known.setdefault(step, digest) == digest
        if len(known) > REMEMBERED:
            del known[next(iter(known))]
        return agrees
