"""What can go wrong when a stage computes, or goes on from a state; each class is a sentence."""


class StageError(Exception):
    """A stage was asked for something it cannot compute; the text names the stage and what it wants instead."""


class GradientMismatch(StageError):
    """The gradient handed to `backward` is not one with respect to what the stage sent."""


class LossNotScalar(StageError):
    """The loss function returned something other than one number."""


class ForeignState(StageError):
    """The state handed to `restore` is not one of this stage."""
