"""Schedules that warm up, then alternate: a stage runs `F x w, (F B) x (M - w), B x w`.

They differ only in the warm-up w: GPipe runs all forwards first, 1F1B as few as keep the later stages busy, the others
lie between. At most w + 1 microbatches are in flight. Four stages, 1F1B (B takes twice as long as F):

    stage 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 == F4 B1 == F5 B2 == F6 B3 ...
    stage 1  .. F0 F1 F2 .. .. .. .. B0 == F3 B1 == F4 B2 == F5 B3 == F6 ...
    stage 2  .. .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 == ...
    stage 3  .. .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ...
"""

from collections.abc import Iterator

from .action import Kind
from .merge import Turn


def gpipe(stages: int, microbatches: int) -> list[int]:
    """Each stage's warm-up in GPipe (arXiv 1811.06965): every forward, then every backward."""
    return [microbatches] * stages


def one_f_one_b(stages: int) -> list[int]:
    """Each stage's warm-up in 1F1B (PipeDream-Flush, arXiv 2006.09503)."""
    return [stages - 1 - stage for stage in range(stages)]


def eager(stages: int) -> list[int]:
    """Each stage's warm-up in eager 1F1B: hides one-way latencies up to half of a forward and a backward."""
    return [2 * (stages - 1 - stage) for stage in range(stages)]


def alternate(stage: int, numbers: range, warm_up: int, first_trainable: int) -> Iterator[Turn]:
    """The turns of `stage` over `numbers`: `warm_up` forwards, then forward and backward in turn, then the remaining
    backwards. A stage below `first_trainable` runs no backward."""
    if stage < first_trainable:
        return (Turn(Kind.FORWARD, stage, number) for number in numbers)
    return _warm_up_and_alternate(stage, numbers, min(warm_up, len(numbers)))


def _warm_up_and_alternate(stage: int, numbers: range, warm_up: int) -> Iterator[Turn]:
    for place, number in enumerate(numbers):
        yield Turn(Kind.FORWARD, stage, number)
        if place >= warm_up:
            yield Turn(Kind.BACKWARD, stage, numbers[place - warm_up])
    for number in numbers[len(numbers) - warm_up :]:
        yield Turn(Kind.BACKWARD, stage, number)
