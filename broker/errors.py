"""The errors of the broker package: what can go wrong between workers, and on which side."""

from stageline.pipeline.errors import StagelineError


class BrokerError(StagelineError):
    """Base of the errors that this package raises on purpose."""


class BadMessage(BrokerError):
    """What arrived is not a valid message: damaged, too large, or of another run or wire version."""


class Unsendable(BrokerError):
    """The payload holds something that cannot travel; the model's output must change."""


class Disagreement(BrokerError):
    """Two messages of one identity have different bits: what computed them was not deterministic."""


class QueueGap(BrokerError):
    """A message skips a number of its queue; the sender lost one or sent out of order."""


class QueueFull(BrokerError):
    """A queue holds as much as it may, and no message is trimmed."""


class QueueClosed(BrokerError):
    """This end of a queue is closed: it can neither put nor take."""


class Fenced(BrokerError):
    """A newer incarnation owns the stage: the worker that gets this error was replaced and must stop."""


class EndpointTaken(BrokerError):
    """An address cannot be bound: in use, or not an address of this machine."""


class AddressUnusable(BrokerError):
    """The text given as the broker's address is not an address."""


class ForeignMessage(BadMessage):
    """An intact message of another run or wire version: a resend would bring the same."""


class Overwritten(BrokerError):
    """A tensor was written to after it was put: a resend of its message would have other bits."""
