"""How long a worker looks for a message before it sleeps: waking up takes longer than most messages do.

A worker that looks in vain takes a processor from those that compute. So each look in vain doubles the number of waits
that sleep at once. A wait that slept and was over sooner than a look ends that: looking would have found the message.
"""

LOOK = 800e-6  # seconds
MOST = 64  # waits in a row that sleep at once


class Looking:
    """Decides for the waits of one worker."""

    def __init__(self, processors: int) -> None:
        self._alone = processors == 1  # the producer needs the processor on which this one would look
        self._in_vain = MOST if self._alone else 1
        self._sleeps = MOST if self._alone else 0

    def seconds(self) -> float:
        """For how long to look in this wait, whose message is not here yet; 0: it sleeps at once. Then call `ended`."""
        if self._sleeps:
            self._sleeps -= 1
            return 0.0
        return LOOK

    def ended(self, looked: float, waited: float | None) -> None:
        """The message came after `waited` seconds, or did not (None), in a wait that was to look for `looked`."""
        if looked and waited is not None and waited <= looked:
            self._in_vain = 1
        elif looked:
            self._in_vain = self._sleeps = min(2 * self._in_vain, MOST)
        elif waited is not None and waited < LOOK and not self._alone:
            self._sleeps = 0
