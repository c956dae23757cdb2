"""Cost of taking less memory."""

import pytest

from stageline.workers.extras.fitting import Moved, added_nanoseconds, moved_bytes
from stageline.workers.extras.fitting.memory_load import COPYING, DISK

STAGE = Moved(activations=1000, weights=100, gradients=100, averages=50, optimizer=200)


@pytest.mark.parametrize(
    ("offload", "wanted"),
    [
        ((), 0),
        (("activations",), 4 * 2000),  # written and read
        (("weights",), 4 * 400 + 400),
        (("optimizer",), 400),
        (("activations", "weights", "optimizer"), 4 * 2400 + 800),
    ],
)
def test_what_is_moved_in_a_step_of_four_microbatches(offload: tuple[str, ...], wanted: int) -> None:
    assert moved_bytes(STAGE, offload, 4) == wanted


def test_activations_of_one_microbatch_are_a_part_of_those_in_flight() -> None:
    movable = {"weights": 7, "gradients": 7, "averages": 0, "optimizer": 14, "activations": 120, "stashed_weights": 5}
    assert Moved.of(movable, 4) == Moved(30, 7, 7, 0, 14)


def test_what_a_disk_carries_while_the_stage_computes_costs_only_its_copying() -> None:
    moved = round(1000 * DISK)
    assert added_nanoseconds(1000, 1000, moved) == round(moved / COPYING)
    assert added_nanoseconds(1000, 1000, 2 * moved) == round(1000 + 2 * moved / COPYING)


def test_computing_again_costs_what_it_takes_and_hides_more() -> None:
    assert added_nanoseconds(1300, 1000, 0) == 300
    moved = round(1300 * DISK)
    assert added_nanoseconds(1300, 1000, moved) == round(300 + moved / COPYING)
