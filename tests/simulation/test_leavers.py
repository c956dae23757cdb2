"""Workers leave on notice, under drawn faults: the run ends as the undisturbed one does."""

import pytest

from simulation.run_seeds import simulate
from simulation.scenario import OF_LEAVERS
from simulation.worker import LEFT_LATE, LEFT_SAVED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "script"),
    [
        (range(1, 9), False),
        (range(1, 4), True),
        *(pytest.param(range(first, first + 100), False, marks=pytest.mark.slow) for first in (9, 109)),
        pytest.param(range(4, 104), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_that_workers_leave_on_notice_under_faults_ends_as_the_undisturbed_one(seeds: range, *, script: bool):
    found = [simulate(seed, script=script, leavers=True) for seed in seeds]
    assert not [str(each) for each in found if each.wrong]
    fired = {fault for each in found for fault, times in each.fired.items() if times}
    assert fired >= {*OF_LEAVERS, LEFT_SAVED, LEFT_LATE}


def test_a_snapshot_of_a_pause_has_no_round_of_evaluation_that_is_to_come_again():
    """A worker that took a leaver's place counted the round after the step of the pause twice, and ended the run."""
    assert not simulate(89, leavers=True).wrong
