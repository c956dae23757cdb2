"""Errors of the broker package: what can go wrong between workers, and on which side."""

from stageline.pipeline.errors import StagelineError


class BrokerError(StagelineError):
    """Base of the errors that this package raises on purpose."""


class BadMessage(BrokerError):
    """Arrival of something that is not a valid message: damaged, too large, or of another run or wire version."""


class Unsendable(BrokerError):
    """Payload that holds a value which cannot travel; the model's output must change."""


class Disagreement(BrokerError):
    """Two messages of one identity with different bits: the computation behind them was not deterministic."""


class QueueGap(BrokerError):
    """Message that skips a number of its queue; the sender lost one or sent out of order."""


class QueueFull(BrokerError):
    """Queue that holds as much as it may while no message is trimmed."""


class QueueClosed(BrokerError):
    """Use of a queue end that is closed: it can neither put nor take."""


class Fenced(BrokerError):
    """Ownership of the stage by a newer incarnation: the worker that gets this error was replaced and must stop."""


class EndpointTaken(BrokerError):
    """Address that cannot be bound: in use, or not an address of this machine."""


class AddressUnusable(BrokerError):
    """Text given as the broker's address that is not an address."""


class ForeignMessage(BadMessage):
    """Intact message of another run or wire version: a resend would bring the same bytes."""


class Overwritten(BrokerError):
    """Write to a tensor after it was put: a resend of its message would have other bits."""
