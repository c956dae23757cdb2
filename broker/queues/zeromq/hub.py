"""All sockets of one worker, and the one wait in which everything that arrives is taken in.

A worker that waits for one message serves its other queues meanwhile: their consumers may be whom it waits for.
"""

import math
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, TypeVar

import zmq

from stageline.broker.codec.message import Limits, Message
from stageline.broker.errors import EndpointTaken
from stageline.broker.queues.wakeup import Wakeup

from .consumer import Consumer
from .dealer import Dealer
from .router import Router
from .socket_options import Context

_Found = TypeVar("_Found")


class Hub:
    """The sockets of a worker of `run`, bound to `url`. `hwm`: messages that may wait for one connection.

    Only the thread that made it may use it, but for `ring`. Raises `EndpointTaken` if `url` cannot be had.
    """

    def __init__(self, run: str, url: str, *, microbatches: int, hwm: int, limits: Limits) -> None:
        self._run = run
        self._microbatches = microbatches
        self._hwm = hwm
        self._limits = limits
        self._dealers: dict[str, Dealer] = {}
        self._bell = Wakeup()
        self._context: Context = zmq.Context()
        self.router = self._bind(url)

    def connect(self, endpoints: Mapping[Consumer, str]) -> dict[Consumer, Dealer]:
        """Connects consumers to the endpoints of their producers, and drops connections that nobody needs any more."""
        dealers = {consumer: self._dealer(endpoint) for consumer, endpoint in endpoints.items()}
        for consumer, dealer in dealers.items():
            for other in self._dealers.values():
                other.remove(consumer)
            dealer.add(consumer)
        for endpoint in [endpoint for endpoint, dealer in self._dealers.items() if not dealer.consumers]:
            self._dealers.pop(endpoint).close()
        self._speak()
        return dealers

    def ring(self) -> None:
        """Ends the wait of the thread that waits. For any thread and for signal handlers."""
        self._bell.ring()

    def wait_for(self, look: Callable[[], _Found | None], timeout: float) -> _Found | None:
        """What `look` finds; None after `timeout` seconds or a ring of the bell."""
        until = monotonic() + timeout
        while True:
            rung = self.turn(until)
            found = look()
            if found is not None or rung or monotonic() >= until:
                return found

    def wait_at(self, dealer: Dealer, consumer: Consumer, timeout: float) -> Message | None:
        """What `consumer` hands out next; None after `timeout` seconds or a ring of the bell.

        While nobody waits for anything from here, it is enough to wait at one socket: one system call, not several.
        """
        if not self.router.owes:
            message = dealer.next_of(consumer, wait=True)
            if message is not None:
                return message
        return self.wait_for(lambda: dealer.next_of(consumer), timeout)

    def turn(self, until: float) -> bool:
        """Waits until something arrives, or until the time `until`, and takes it in. True if the bell was rung."""
        self._speak()
        ready: dict[Any, int] = dict(zmq.zmq_poll(self._watched(), self._pause(until)))
        if self.router.socket in ready:
            self.router.serve()
        now = monotonic()
        for dealer in self._dealers.values():
            if ready.get(dealer.socket, 0) & zmq.POLLIN:
                dealer.receive(now)  # one, so that whoever waits for it gets it at once; the next turn takes the rest
        if self._bell.fileno() not in ready:
            return False
        self._bell.silence()
        return True

    def close(self) -> None:
        """Waits a second at most for what is on its way out."""
        for dealer in self._dealers.values():
            dealer.close()
        self.router.close()
        self._context.term()
        self._bell.close()

    def _bind(self, url: str) -> Router:
        try:
            return Router(self._context, url, self._run, self._hwm)
        except EndpointTaken:
            self._context.destroy(0)
            self._bell.close()
            raise

    def _dealer(self, endpoint: str) -> Dealer:
        if endpoint not in self._dealers:
            self._dealers[endpoint] = Dealer(
                self._context,
                endpoint,
                self._run,
                microbatches=self._microbatches,
                hwm=self._hwm,
                limits=self._limits,
            )
        return self._dealers[endpoint]

    def _speak(self) -> None:
        now = monotonic()
        for dealer in self._dealers.values():
            dealer.speak(now)

    def _watched(self) -> list[tuple[Any, int]]:
        dealers = [(dealer.socket, dealer.watched) for dealer in self._dealers.values()]
        return [(self.router.socket, zmq.POLLIN), (self._bell.fileno(), zmq.POLLIN), *dealers]

    def _pause(self, until: float) -> int:
        """Milliseconds until `until`, or until a dealer has something to say again."""
        due = min([until, *[dealer.due for dealer in self._dealers.values()]])
        return max(0, math.ceil((due - monotonic()) * 1000))
