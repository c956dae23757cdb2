"""One worker's state machine: every command, and the events that do not answer it."""

import pytest
from msgspec.structs import replace

from stageline.pipeline.evaluation import Rounds
from stageline.pipeline.schedule import make_schedule
from stageline.workers.runtime.machine import AwaitCredit, Closed, Compute, Finish, Machine, OutOfPlace, Take
from support.programs import calls_of
from support.shapes import line

FORWARD, BACKWARD = "forward-1", "backward-1"


def machine(worker: int = 1) -> Machine:
    return Machine(calls_of(make_schedule("gpipe", line(3), 1), 1).instructions(worker))


def test_each_instruction_waits_for_what_it_takes_and_is_then_computed() -> None:
    walked = machine()
    taken = []
    while not isinstance(walked.command, Finish):
        if isinstance(walked.command, Take):
            taken.append(f"{walked.command.instruction.name} {walked.command.queue}")
            walked.arrived(walked.command.queue, 0, 0)
        assert isinstance(walked.command, Compute)
        walked.computed()
    assert taken == ["1F0 forward-1", "1B0 backward-1"]


def test_an_instruction_that_takes_from_two_queues_waits_for_both_in_order() -> None:
    first = next(calls_of(make_schedule("gpipe", line(3), 1), 1).instructions(1))
    walked = Machine(iter([replace(first, op=replace(first.op, takes=(FORWARD, BACKWARD)))]))
    assert isinstance(walked.command, Take)
    assert walked.command.queue == FORWARD
    assert isinstance(walked.arrived(FORWARD, 0, 0), Take)
    assert isinstance(walked.arrived(BACKWARD, 0, 0), Compute)


@pytest.mark.parametrize("place", [(BACKWARD, 0, 0), (FORWARD, 1, 0), (FORWARD, 0, 1)])
def test_a_message_of_another_place_is_refused(place) -> None:
    with pytest.raises(OutOfPlace, match="but 1F0 of step 0 needs microbatch 0 of step 0 on forward-1"):
        machine().arrived(*place)


def test_what_a_stage_that_runs_forward_only_gives_waits_for_credit_first() -> None:
    program = calls_of(make_schedule("gpipe", line(3), 1, first_trainable=2), 1)
    walked = Machine(program.instructions(1))
    assert isinstance(walked.command, AwaitCredit)
    assert str(walked.command.queue) == "forward-2"
    assert isinstance(walked.granted(), Take)
    assert isinstance(walked.arrived(FORWARD, 0, 0), Compute)
    assert isinstance(walked.computed(), Compute)  # its update
    with pytest.raises(OutOfPlace, match="none was waited for"):
        walked.granted()
    assert isinstance(Machine(program.instructions(0)).granted(), Compute)
    assert isinstance(Machine(program.instructions(2)).command, Take)


def test_a_step_that_is_held_back_is_not_begun_until_it_may_be_and_one_that_is_begun_is_finished() -> None:
    walked = Machine(calls_of(make_schedule("gpipe", line(3), 1), 4).instructions(0))
    assert walked.hold(0) == 1  # step 0 is begun
    for _ in range(3):
        assert not isinstance(walked.command, Closed)
        if isinstance(walked.command, Take):
            walked.arrived(walked.command.queue, 0, 0)
        walked.computed()
    assert walked.command == Closed(next(calls_of(make_schedule("gpipe", line(3), 1), 4).instructions(0, 1)))
    assert walked.hold(3) == 3  # the step that all agree on
    assert isinstance(walked.command, Compute)
    assert walked.begun == 2
    assert walked.hold(1) == 2
    assert walked.hold(None) is None


def test_an_evaluated_batch_is_not_held_back() -> None:
    calls = calls_of(make_schedule("gpipe", line(2), 1), 2, Rounds(2, 1, None))
    walked = Machine(iter([]))
    walked.hold(0)
    assert isinstance(walked.extend(iter([*calls.program.evaluation(0, range(1))])), AwaitCredit)


def test_an_event_that_does_not_answer_the_command_is_refused() -> None:
    with pytest.raises(OutOfPlace, match="nothing was to be computed"):
        machine().computed()
    first = machine(worker=0)
    with pytest.raises(OutOfPlace, match="none was asked for"):
        first.arrived(FORWARD, 0, 0)


def test_a_program_that_is_over_may_be_extended_and_only_then() -> None:
    program = calls_of(make_schedule("gpipe", line(3), 1), 1)
    walked = Machine(iter(()))
    assert isinstance(walked.command, Finish)
    assert isinstance(walked.extend(iter(())), Finish)
    assert isinstance(walked.extend(program.instructions(1)), Take)
    with pytest.raises(OutOfPlace, match="extended before its end"):
        walked.extend(iter(()))
