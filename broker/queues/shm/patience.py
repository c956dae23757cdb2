"""How long a worker looks for a message before it sleeps: waking up takes longer than most messages do.

A worker that looks in vain takes a processor from those that compute. So each time in vain doubles the number of waits
that sleep at once.
"""

LOOK = 200e-6  # seconds
MOST = 64  # waits in a row that sleep at once


class Looking:
    """Decides for the waits of one worker."""

    def __init__(self, processors: int) -> None:
        self._in_vain = 1 if processors > 1 else MOST
        self._sleeps = 0 if processors > 1 else MOST

    def seconds(self) -> float:
        """For how long to look now."""
        if self._sleeps:
            self._sleeps -= 1
            return 0.0
        return LOOK

    def found(self) -> None:
        """It was worth it."""
        self._in_vain = 1

    def in_vain(self) -> None:
        self._in_vain = min(2 * self._in_vain, MOST)
        self._sleeps = self._in_vain
