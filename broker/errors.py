"""Errors of the broker package: what can go wrong between workers, and on which side."""

from stageline.pipeline.errors import StagelineError


class BrokerError(StagelineError):
    """Base of the errors that this package raises on purpose."""


class BadMessage(BrokerError):
    """Error that what arrived is not a valid message: damaged, too large, or of another run or wire version."""


class Unsendable(BrokerError):
    """Error that a payload holds a value which cannot travel; the model's output must change."""


class Disagreement(BrokerError):
    """Error that two messages of one identity have different bits: what computed them was not deterministic."""


class QueueGap(BrokerError):
    """Error that a message skips a number of its queue; the sender lost one or sent out of order."""


class QueueFull(BrokerError):
    """Error that a queue holds as much as it may, and no message is trimmed."""


class QueueClosed(BrokerError):
    """Error that this end of a queue is closed: it can neither put nor take."""


class Fenced(BrokerError):
    """Error that a newer incarnation owns the stage: the worker that gets this error was replaced and must stop."""


class EndpointTaken(BrokerError):
    """Error that an address cannot be bound: it is in use, or not an address of this machine."""


class AddressUnusable(BrokerError):
    """Error that the text given as the broker's address is not an address."""


class ForeignMessage(BadMessage):
    """Error that an intact message is of another run or wire version: a resend would bring the same bytes."""


class Overwritten(BrokerError):
    """Error that a tensor was written to after it was put: a resend of its message would have other bits."""
