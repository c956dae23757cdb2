"""Zero bubble schedules: pictures, torch's own lists, their bubbles and their memory."""

from typing import Any

import pytest

from stageline.pipeline.program import Costs, TiedStages, check_schedule, compile_program
from stageline.pipeline.schedule import ONCE_PER_STEP, Kind, Schedule, make_schedule
from support.shapes import accepted, drawn, line

SPLITS = [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 3, 2), (2, 5, 2)]  # times of F, I and W, none shorter than W


def each_takes(stages: int, forward: float, inwards: float, weights: float) -> Costs:
    return Costs(
        (forward,) * stages, (inwards,) * stages, (weights,) * stages, (0,) * stages, (0,) * max(0, stages - 1)
    )


def ours(schedule: Schedule, worker: int) -> list[str]:
    return [str(action) for action in schedule.workers[worker] if action.kind not in ONCE_PER_STEP]


def torchs(order: list[Any]) -> list[str]:
    """torch's compute-only list without its padding; a forward and a backward that it overlaps follow each other."""
    flat = [part for each in order if each is not None for part in each.sub_actions or (each,)]
    return [str(each) for each in flat]


def test_gradients_of_weights_fill_what_1f1b_leaves_idle() -> None:
    assert drawn(make_schedule("zb-h1", line(4), 6)).splitlines() == [
        "F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5",
        ".. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5",
        ".. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5",
        ".. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5",
    ]


def test_with_a_window_stages_run_further_ahead_and_defer_more_weights() -> None:
    assert drawn(make_schedule("zb-h1", line(2), 5, window=(4, 1))).splitlines() == [
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4",
        ".. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4",
    ]


@pytest.mark.parametrize("stages", range(1, 6))
def test_with_1f1bs_window_it_is_the_same(stages: int) -> None:
    for schedule in accepted("zb-h1", line(stages), 8):
        window = range(stages, 0, -1)
        assert make_schedule("zb-h1", line(stages), schedule.microbatches, window=window) == schedule


@pytest.mark.parametrize("workers", range(1, 7))
def test_zb_h1_is_torchs_with_a_stage_for_each_worker(workers: int) -> None:
    from torch.distributed.pipelining import schedules  # which takes seconds to load

    for schedule in accepted("zb-h1", line(workers), 16):
        theirs: Any = object.__new__(schedules.ScheduleInterleavedZeroBubble)
        theirs.pp_group_size, theirs.n_local_stages = workers, 1
        theirs._n_microbatches = schedule.microbatches
        theirs.microbatches_per_round = schedule.microbatches // max(1, schedule.microbatches // workers)
        for worker in range(workers):
            assert ours(schedule, worker) == torchs(theirs._calculate_single_rank_operations(worker))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, *(pytest.param(each, marks=pytest.mark.slow) for each in range(5, 9))])
def test_zb_h1_has_the_bubble_and_the_memory_of_the_catalogue(stages: int) -> None:
    for schedule in accepted("zb-h1", line(stages), 20):
        for forward, inwards, weights in SPLITS:
            verdict = check_schedule(schedule, each_takes(stages, forward, inwards, weights))
            assert verdict.stage_peak == (min(schedule.microbatches, stages),) * stages
            if schedule.microbatches >= stages:
                assert verdict.bubble == (stages - 1) * (forward + inwards - weights)
        for stage in range(stages):
            assert most_before_input(schedule, stage) == min(schedule.microbatches, stages - stage)


def most_before_input(schedule: Schedule, stage: int) -> int:
    """The most microbatches that a stage has run forward, and whose gradients it has not sent."""
    held, most = 0, 0
    for action in schedule.workers[schedule.owner(stage)]:
        if action.stage == stage:
            held += (action.kind is Kind.FORWARD) - (action.kind in (Kind.INPUT, Kind.BACKWARD))
            most = max(most, held)
    return most


def test_stages_that_do_not_train_run_no_half() -> None:
    schedule = make_schedule("zb-h1", line(3), 2, first_trainable=1)
    assert [str(each) for each in schedule.workers[0]] == ["0F0", "0F1", "0U"]
    assert [str(each) for each in schedule.workers[1]] == ["1F0", "1F1", "1I0", "1W0", "1I1", "1W1", "1U"]
    assert [compile_program(schedule).splits(stage) for stage in (0, 1)] == [False, True]


def test_a_stage_that_sends_gradients_of_what_it_shares_does_not_split_its_backwards() -> None:
    program = compile_program(make_schedule("zb-h1", line(3), 4), [TiedStages(((0, 2),))])
    assert [op.name for op in program.step[2]][:6] == ["2F0", "2B0", "2T0", "2F1", "2B1", "2T1"]
    assert [program.splits(stage) for stage in range(3)] == [True, True, False]
    taken = {op.name: op.takes for op in program.step[0]}
    assert (taken["0I0"], taken["0W0"]) == (("backward-0",), ("tied-0",))
    check_schedule(program)
