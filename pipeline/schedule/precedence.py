"""What an action of a microbatch comes after, in the list of its stage's worker."""

from stageline.pipeline.schedule.action import Kind

# These actions of its stage on the previous microbatch, so that messages are numbered and gradients added in the order
# of microbatches.
AFTER_PREVIOUS: dict[str, tuple[Kind, ...]] = {
    Kind.FORWARD: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.TIED),
    Kind.INPUT: (Kind.BACKWARD, Kind.INPUT),
    Kind.WEIGHT: (Kind.BACKWARD, Kind.WEIGHT, Kind.TIED),
    Kind.TIED: (Kind.TIED,),
}

# These actions of its stage on the same microbatch, since it builds on them.
BUILDS_ON: dict[str, tuple[Kind, ...]] = {
    Kind.BACKWARD: (Kind.FORWARD,),
    Kind.INPUT: (Kind.FORWARD,),
    Kind.WEIGHT: (Kind.INPUT,),
    Kind.TIED: (Kind.BACKWARD, Kind.WEIGHT),
}
