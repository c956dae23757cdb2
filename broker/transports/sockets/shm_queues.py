"""Queues between processes of one machine: `shm://`. Unix sockets carry messages; large ones lie in shared memory.

    worker 0                                    worker 1
    Outbound -- Sender -- Listener --packets--> Dialer -- Receiver -- Inbound
                                    <-requests--

No thread but the worker's own has to run for a message to arrive: the system wakes the process that waits for it.
"""

import math
import select
from time import monotonic

from stageline.broker.errors import EndpointTaken
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.linked import LinkedQueues
from stageline.broker.transports.sockets.shm_dialer import Dialer

from .shm_producer import Listener


class ShmQueues(LinkedQueues):
    """All queue ends of one worker. `url`: `shm://` and the path of a socket. Raises `EndpointTaken`."""

    schemes = ("shm://",)
    _links: dict[str, Dialer]  # type: ignore[assignment]  # no other kind is opened here

    def __init__(self, run: str, incarnation: int, url: str, options: QueueOptions) -> None:
        super().__init__(run, incarnation, options)
        self.endpoint = url
        try:
            self.outbound_link = self._listener = Listener(url, run, options.key)
        except EndpointTaken:
            self._wakeup.close()
            raise

    @property
    def trouble(self) -> Trouble | None:
        return self._listener.trouble

    def _close_links(self) -> None:
        for dialer in self._links.values():
            dialer.close()
        self._listener.close()

    def _poll(self, until: float) -> bool:
        self._send_requests()
        now = monotonic()
        watched = {self._wakeup.fd: select.POLLIN, **self._listener.watched(now)}
        dialers = {}
        for dialer in self._links.values():
            if dialer.descriptor is not None:
                dialers[dialer.descriptor] = dialer
                watched[dialer.descriptor] = dialer.events
        due = min([until, self._listener.due(now), *[dialer.due for dialer in self._links.values()]])
        ready = _ready(watched, due - now)
        now = monotonic()
        for descriptor in ready & dialers.keys():
            dialers[descriptor].receive(now)  # only one, so that it can be taken at once; the next turn has the rest
        if ready - dialers.keys() - {self._wakeup.fd}:
            self._listener.serve()
        if self._wakeup.fd not in ready:
            return False
        self._wakeup.silence()
        return True

    def _open_link(self, endpoint: str) -> Dialer:
        return Dialer(endpoint, self.run, microbatches=self.options.microbatches, key=self.options.key)


def _ready(watched: dict[int, int], seconds: float) -> set[int]:
    """Those of the descriptors that became ready within so many seconds."""
    poll = select.poll()
    for descriptor, events in watched.items():
        poll.register(descriptor, events)
    return {descriptor for descriptor, _ in poll.poll(max(0, math.ceil(seconds * 1000)))}
