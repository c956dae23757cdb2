"""ZB-H1 (arXiv 2401.10241): 1F1B in which backwards are split, and the gradients of weights fill what was idle.

The stage before waits only for the gradient of the input, I; that of the weights, W, can wait until nothing else is to
be done. Stage r defers r of them, so each holds as many microbatches as stage 0, which is what stage 0 of 1F1B holds.
With P stages and at least as many microbatches the bubble is (P - 1)(F + I - W) in place of (P - 1)(F + I + W), if W is
the shortest of the three. A stage may also run more microbatches ahead, where messages take time: with K[r] in flight
until I, it defers K[0] - K[r], so that each holds K[0]. Four stages (F, I and W take equally long):

    stage 0  F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 ... F7 I4 W4 I5 W5 I6 W6 I7 W7
    stage 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 ... W3 F7 I5 W4 I6 W5 I7 W6 W7
    stage 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 ... I5 W3 F7 I6 W4 I7 W5 W6 W7
    stage 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 ... F6 I6 W3 F7 I7 W4 W5 W6 W7
"""

from collections.abc import Iterator

from .action import Action, Kind


def with_deferred_weights(
    stage: int, numbers: range, warm_up: int, deferred: int, first_trainable: int
) -> Iterator[Action]:
    """The actions of `stage` on the microbatches `numbers`: `warm_up` forwards, then forward and input gradient in
    turn, the gradients of weights `deferred` microbatches later. A stage below `first_trainable` runs no backward."""
    trains = stage >= first_trainable
    warm_up = min(warm_up, len(numbers))
    for number in numbers[:warm_up]:
        yield Action(Kind.FORWARD, stage, number)
    for place, number in enumerate(numbers):
        if place + warm_up < len(numbers):
            yield Action(Kind.FORWARD, stage, numbers[place + warm_up])
        if trains:
            yield Action(Kind.INPUT, stage, number)
        if trains and place >= deferred:
            yield Action(Kind.WEIGHT, stage, numbers[place - deferred])
    for number in numbers[max(0, len(numbers) - deferred) :] if trains else ():
        yield Action(Kind.WEIGHT, stage, number)
