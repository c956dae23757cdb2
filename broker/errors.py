"""What can go wrong between workers; each class is a sentence and says whose fault it is."""

from stageline.pipeline.errors import StagelineError


class BrokerError(StagelineError):
    """Base of the errors that this package raises on purpose."""


class BadMessage(BrokerError):
    """What arrived is not a message of ours, or not any more: damaged, too large, of another run or wire version."""


class Unsendable(BrokerError):
    """The sender's payload holds something that cannot travel; the model's output must change."""


class Disagreement(BrokerError):
    """Two messages of one identity have different bits: something that computed them was not deterministic."""


class QueueGap(BrokerError):
    """A message skips a number of its queue; the sender lost one or sent out of order."""


class QueueFull(BrokerError):
    """A queue holds all it may and nobody takes from it."""


class QueueClosed(BrokerError):
    """This end of a queue was closed and can neither put nor take."""


class Fenced(BrokerError):
    """A newer incarnation owns the stage: whoever gets this is a zombie and must stop."""


class EndpointTaken(BrokerError):
    """An address to listen at cannot be had: in use, or not an address of this machine."""


class AddressUnusable(BrokerError):
    """What is given as the broker's address cannot be one."""


class ForeignMessage(BadMessage):
    """An intact message of another run or wire version: asking again would bring the same."""


class Overwritten(BrokerError):
    """A tensor was written to after it was put: sent again, its message would have other bits."""
