"""Reports of a worker whose compute loop waits: for messages, room, or the server of its queues."""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import islice
from time import monotonic, time
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from stageline.broker.control.channel import LARGEST
from stageline.broker.control.messages import MOST_DIGESTS, MOST_TIMES, WAITS, Report
from stageline.broker.control.protocol import encode
from stageline.broker.control.records import EvaluationRecord, Lack, StepRecord, Wait
from stageline.broker.queues.base import Trouble, WorkerQueues
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.redis.queues import RedisQueues
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.evaluation import Rounds
from stageline.pipeline.program import Instruction, Per
from stageline.pipeline.schedule import forward_only, make_schedule
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.control.session import MOST_REPEATED, Reporter
from stageline.workers.runtime.calls import Call, CallKind, Position, instructions_of
from stageline.workers.runtime.idle import CallWait
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.machine import AwaitCredit, Take
from stageline.workers.runtime.plan_calls import PlanCalls
from stageline.workers.runtime.progress import Progress
from support.programs import calls_of, queued_calls
from support.queue_pair import queue_of
from support.redis_server import RedisServer
from support.shapes import line

FORWARD = queue_of("forward-1")
M = 4


def program(steps: int) -> PlanCalls:
    return calls_of(forward_only(((0,), (1,)), 1), steps)


def instruction() -> Instruction:
    return next(program(1).instructions(0))


def reported(progress: Progress) -> Report:
    return Reporter(progress, 1, 10).report(monotonic())


class Stages:
    """An executor whose results are too large for what a producer may keep."""

    loss = None

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        return torch.zeros(1000)

    def evaluated(self, step: int) -> EvaluationRecord:
        return EvaluationRecord(step, 0)


def test_credit_that_is_waited_for_is_told_with_the_stage_that_grants_it() -> None:
    calls = calls_of(make_schedule("1f1b", line(2), M, first_trainable=1), 1)
    progress = Progress(program=calls.program)
    progress.waiting(AwaitCredit("forward-1", next(calls.instructions(0))))
    assert reported(progress).now == "waits for credit in forward-1 to run 0F0 of step 0"
    (wait,) = reported(progress).waits
    assert (wait.queue, wait.number, wait.action, wait.lacks) == ("forward-1", 0, "0F0", Lack.CREDIT)


def test_a_microbatch_is_done_with_a_forward_that_no_backward_follows() -> None:
    def state(first_trainable: int) -> str:
        schedule = make_schedule("1f1b", line(2), M, first_trainable=first_trainable)
        calls = calls_of(schedule, 1)
        progress = Progress.of(calls, 0, now=1.0)
        forward, following = islice(calls.instructions(0), 2)
        progress.computing(forward, 1.0)
        progress.done(forward, 2.0)
        progress.waiting(Take("forward-1", following))
        return reported(progress).events[-1].state

    assert [state(first_trainable=1), state(first_trainable=0)] == ["done", "stashed"]


def test_a_put_that_waits_for_room_is_reported_as_a_wait_and_not_as_computing() -> None:
    """It was reported as the action that gave what was to be put: after a lease, the worker counted as hanging."""
    reports: list[Report] = []

    def waiting(reason: str) -> None:
        worker.lacks_room()
        reports.append(reported(worker.progress))
        if len(reports) == 2:
            queues.outbound(FORWARD).trim(1)

    terms = QueueOptions(retain_bytes=5000, spill_bytes=0, waiting=waiting)
    with closing(ZeroMQQueues("run", 1, "tcp://127.0.0.1:0", terms)) as queues:
        worker = WorkerLoop(program(2), 0, Stages(), queues, run="run", incarnation=1)
        worker.poll(0)
        assert not reports
        before = time()
        worker.poll(0)
    assert [report.now for report in reports] == 2 * [f"{WAITS} for room in forward-1 to put what 0F0 of step 1 gives"]
    ((wait,), _) = (report.waits for report in reports)
    assert (wait.queue, wait.number, wait.action, wait.step, wait.lacks) == ("forward-1", 1, "0F0", 1, Lack.ROOM)
    assert before <= wait.since <= time()
    assert (worker.progress.full, worker.progress.actions) == (None, 2)
    after = reported(worker.progress)
    assert after.waits == []


def test_time_that_room_was_waited_for_is_not_time_computed() -> None:
    progress = Progress()
    progress.computing(instruction(), 100.0)
    for now in (102.0, 150.0):  # called again and again
        progress.lacks_room(Take(FORWARD, instruction()), now)
    progress.done(instruction(), 160.0)
    assert progress.busy == 2.0
    assert [(done.start, done.end) for done in progress.open[0]] == [(100.0, 102.0)]
    assert (progress.full, progress.since) == (None, 160.0)


def test_a_worker_that_waits_for_room_is_in_no_layer() -> None:
    stage = Stage(nn.Linear(1, 1), settings=StageSettings(names=["layers.3"]))
    progress = Progress()
    reporter = Reporter(progress, 1, 10, where=lambda index: stage.where)
    progress.computing(instruction(), 100.0)
    assert reporter.report(0.0).layer == "layer layers.3"
    progress.lacks_room(Take(FORWARD, instruction()), 102.0)
    assert reporter.report(0.0).layer == ""


def test_trouble_with_the_server_is_reported_with_its_age_and_is_what_a_worker_waits_for() -> None:
    queues = cast("WorkerQueues", SimpleNamespace(trouble=Trouble("Redis is away", 90.0)))
    progress = Progress(queues=queues)
    progress.computing(instruction(), 100.0)
    report = Reporter(progress, 1, 10).report(102.5)
    assert (report.trouble, report.troubled, report.now) == ("Redis is away", 12.5, "0F0 of step 0")
    progress.waiting(Take(FORWARD, instruction()))
    assert reported(progress).now == f"{WAITS} for the server of its queues: Redis is away"


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def test_a_redis_server_that_is_killed_and_comes_back_is_reported(stack: ExitStack) -> None:
    server = stack.enter_context(RedisServer())
    queues = stack.enter_context(closing(RedisQueues("run", 1, server.url, QueueOptions())))
    queues.outbound(FORWARD)
    progress = Progress(queues=queues)
    assert reported(progress).trouble == ""
    server.kill()
    first = until_reported(progress, queues, troubled=True)
    assert f"Redis at redis://127.0.0.1:{server.port}/0 cannot be reached" in first.trouble
    queues.pump(0.3)
    assert reported(progress).troubled > first.troubled
    server.start()
    assert until_reported(progress, queues, troubled=False).troubled == 0.0


def until_reported(progress: Progress, queues: RedisQueues, *, troubled: bool) -> Report:
    end = monotonic() + 20
    while bool((report := reported(progress)).trouble) != troubled:
        assert monotonic() < end
        queues.pump(0.05)
    return report


def test_a_worker_that_waits_for_the_script_says_for_which_call() -> None:
    progress = Progress(finished={0: 3})
    progress.waiting_for_call(CallWait("call 12 of the script", "call-0", 12, "call 12"), 50.0)
    report = reported(progress)
    assert report.waiting
    assert report.now == "waits for call 12 of the script"
    assert report.waits == [Wait("call-0", 12, "call 12", 12, 50.0)]
    progress.lacks_room_for(CallWait("the script to take its replies", "reply-0", 12, "call 12"), 60.0)
    report = reported(progress)
    assert report.now == "waits for the script to take its replies"
    assert report.waits == [Wait("reply-0", 12, "call 12", 12, 60.0, Lack.ROOM)]


def test_an_evaluated_batch_of_a_script_is_no_event_of_a_step() -> None:
    progress = Progress()
    scripted = queued_calls(make_schedule("gpipe", line(2), 1))
    (evaluating,) = instructions_of(Call(CallKind.EVALUATE, 0, 0, 7), scripted.program, 1)
    progress.computing(evaluating, 1.0)
    report = reported(progress)
    assert (report.now, report.events) == ("1F0 of evaluated batch 7", [])


def test_a_snapshot_that_comes_before_its_replies_keeps_nothing_from_being_confirmed() -> None:
    progress = Progress(positions={2: Position(2, 3, 0)}, answered={Per.STEP: 1})
    progress.durable(0, 2)
    reporter = Reporter(progress, 1, None)
    assert reporter.report(0.0).snapshots == []
    assert reporter.all_confirmed
    progress.answered[Per.STEP] = 2
    assert not reporter.all_confirmed
    assert reporter.report(5.0).snapshots == [(0, 2)]


def test_digests_of_queues_are_repeated_until_they_are_confirmed_and_no_snapshot_overtakes_them() -> None:
    moved = [("forward-1", step, f"{step:016x}") for step in range(MOST_DIGESTS + 1)]
    progress = Progress(digests=deque(moved))
    progress.durable(0, 2)
    reporter = Reporter(progress, 1, 10)
    assert not reporter.all_confirmed
    first = reporter.report(0.0)
    assert (first.digests, first.snapshots) == (moved[:-1], [])
    assert reporter.heartbeat(0.1).digests == []
    again = reporter.report(5.0)
    assert again.digests == moved[:-1]
    reporter.confirmed(again.number)
    last = reporter.report(10.0)
    assert (last.digests, last.snapshots) == (moved[-1:], [(0, 2)])
    reporter.confirmed(last.number)
    assert reporter.all_confirmed


def test_another_broker_gets_the_digests_from_the_complete_checkpoint_on_before_any_snapshot() -> None:
    """It knows nothing of what its predecessor has compared: a stream that was replaced before went unnoticed."""
    moved = [("forward-1", step, f"{step:016x}") for step in range(MOST_DIGESTS)]
    rounds = [("evaluation-1", step, f"{step:016x}") for step in range(2)]  # counted by evaluated batches
    progress = Progress(
        ends=calls_of(forward_only(line(2), 1), 9, Rounds(9, 1, 2)).program.ends_of(0),
        position_after=lambda step: Position(step, evaluations=step // 2),
    )
    reporter = Reporter(progress, 1, None)
    for sent in (moved, rounds):
        progress.digests.extend(sent)
        reporter.confirmed(reporter.report(0.0).number)
    progress.durable(0, 4)
    progress.completed(2)
    reporter.confirmed(reporter.report(10.0).number)
    reporter.resend_all(2)
    assert not reporter.all_confirmed
    new = [("forward-1", step, f"{step:016x}") for step in range(MOST_DIGESTS, MOST_DIGESTS + 2)]
    progress.digests.extend(new)
    first = reporter.report(20.0)
    assert (first.digests, first.snapshots) == ([*moved[2:], rounds[1], new[0]], [])
    reporter.resend_all(3)  # a third broker, before the second one has confirmed them
    again = reporter.report(30.0)
    assert (again.digests, again.snapshots) == (first.digests, [])
    reporter.confirmed(again.number)
    last = reporter.report(40.0)
    assert (last.digests, last.snapshots) == (new[1:], [(0, 4)])
    reporter.confirmed(last.number)
    assert reporter.all_confirmed


def test_a_worker_keeps_a_bounded_number_of_confirmed_digests() -> None:
    progress = Progress()
    reporter = Reporter(progress, 1, None)
    for step in range(MOST_REPEATED + MOST_DIGESTS):
        progress.digests.append(("forward-1", step, "0" * 16))
    while not reporter.all_confirmed:
        reporter.confirmed(reporter.report(0.0).number)
    reporter.resend_all(2)
    assert reporter.report(10.0).digests[0] == ("forward-1", MOST_DIGESTS, "0" * 16)


def test_the_steps_of_a_long_schedule_come_in_several_reports_that_a_channel_carries() -> None:
    """A full report of 2000 steps was longer than the longest message: the broker never got it."""
    done = [StepRecord(0, step, bytes(MOST_TIMES // 4 + 1)) for step in range(40)]
    progress = Progress(steps=deque(done))
    reporter, received, turn = Reporter(progress, 1, None), [], 0.0
    while not reporter.all_confirmed:
        turn += 10.0
        sent = reporter.report(turn)
        assert len(encode(sent)) < LARGEST // 2
        received += sent.steps
        reporter.confirmed(sent.number)
    assert (received, turn) == (done, 100.0)
