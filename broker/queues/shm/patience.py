"""How long a worker looks for a message before it sleeps: waking up takes longer than most messages do.

A worker that looks in vain takes a processor from those that compute. So each look in vain doubles the number of waits
that sleep at once. A wait that slept and was over sooner than a look ends that: looking would have found the message.
"""

LOOK = 200e-6  # seconds
MOST = 64  # waits in a row that sleep at once


class Looking:
    """Decides for the waits of one worker."""

    def __init__(self, processors: int) -> None:
        self._alone = processors == 1  # the producer needs the processor on which this one would look
        self._in_vain = MOST if self._alone else 1
        self._sleeps = MOST if self._alone else 0

    def seconds(self) -> float:
        """For how long to look in this wait, whose message is not here yet; 0: it sleeps at once."""
        if self._sleeps:
            self._sleeps -= 1
            return 0.0
        return LOOK

    def found(self) -> None:
        """The look was worth it."""
        self._in_vain = 1

    def in_vain(self) -> None:
        """The look was not. Not for a wait that slept at once."""
        self._in_vain = min(2 * self._in_vain, MOST)
        self._sleeps = self._in_vain

    def woken(self, seconds: float) -> None:
        """The message came after so many `seconds` of waiting, asleep."""
        if seconds < LOOK and not self._alone:
            self._sleeps = 0
