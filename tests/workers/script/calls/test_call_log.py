"""The numbers of a script's calls, and the messages that they become."""

from collections.abc import Iterator

import torch

from stageline.broker.codec.message import Message, encode
from stageline.pipeline.schedule import make_schedule
from stageline.workers.runtime.calls import Call, CallKind, Position
from stageline.workers.script.calls.calls import CallLog, messages
from support.programs import queued_calls

MIXED = [
    CallKind.TRAIN, CallKind.TRAIN, CallKind.EVALUATE, CallKind.PREDICT, CallKind.TRAIN, CallKind.STATE, CallKind.TRAIN,
]  # fmt: skip


class ReversedSet(frozenset[str]):
    """A set in the order that it may have in a process whose hashes are other ones."""

    def __iter__(self) -> Iterator[str]:
        return reversed(list(super().__iter__()))


def test_calls_steps_and_evaluations_are_counted_apart():
    log = CallLog(Position(0, 0, 0))
    calls = [log.numbered(Call(kind)) for kind in MIXED]
    assert [call.number for call in calls] == list(range(7))
    assert [call.step for call in calls] == [0, 1, 2, 2, 2, 3, 3]
    assert [call.evaluation for call in calls] == [0, 0, 0, 1, 2, 2, 2]
    assert log.position == Position(4, 7, 2)


def test_the_position_of_a_checkpoint_is_right_after_its_last_step():
    log = CallLog(Position(0, 0, 0))
    for kind in MIXED:
        log.numbered(Call(kind))
    assert log.trim(2) == Position(2, 2, 0)  # the evaluations that follow belong to what comes after it
    assert log.trim(3) == Position(3, 5, 2)
    assert log.trim(2) is None


def test_a_log_goes_on_from_a_checkpoint():
    log = CallLog(Position(20, 25, 5))
    assert log.trim(20) == Position(20, 25, 5)
    call = log.numbered(Call(CallKind.TRAIN))
    assert (call.number, call.step, call.evaluation) == (25, 20, 5)
    assert log.trim(21) == Position(21, 26, 5)


def test_the_bytes_of_a_call_are_those_of_the_same_call_in_another_process():
    """Weights went in the order of a set of their names, which differs between two processes of one script."""
    names = frozenset(f"{layer}.{name}" for layer in range(8) for name in ("weight", "bias"))
    state = {name: torch.full((2,), float(len(name))) for name in names}
    program = queued_calls(make_schedule("1f1b", [[0]], 2)).program

    def sent(order: frozenset[str]) -> list[bytes]:
        call = CallLog(Position(0, 0, 0)).numbered(Call(CallKind.LOAD, state=state))
        found: list[Message] = list(messages(call, program, [order], "run", 1))
        return [bytes(frame) for message in found for frame in encode(message)]

    assert list(ReversedSet(names)) != list(names)
    assert sent(names) == sent(ReversedSet(names))
