"""Records the microbatch that stops a run, so that it can be run again alone: its messages, and the stage's state.

This costs nothing before a microbatch fails. Its messages are still retained by their producers: the queues are
rewound, and deliver them again.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from time import monotonic

from stageline.broker.codec.message import Message, encode
from stageline.broker.errors import BrokerError
from stageline.broker.queues.base import QueueKey, Queues
from stageline.pipeline.numbering import message_number
from stageline.pipeline.schedule import Action, Kind
from stageline.workers.checkpoint.manifest import Origin
from stageline.workers.checkpoint.snapshot import Snapshot, write_snapshot
from stageline.workers.disk.atomic_file import draft_of, publish, sync, write_json
from stageline.workers.disk.tensor_file import Unsaveable
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.executor import ComputeFailed, Culprit, Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import PATIENCE

from .capture import output_key
from .directory import MESSAGES, REASON, Reason, RecordDirectory
from .record_file import Direction, write_entry

LONGEST = 5.0  # seconds that the producers have to deliver the messages again


def record_failure(
    job: Job, executor: Executor, queues: Queues, error: ComputeFailed, run: str, incarnation: int
) -> str:
    """Records the microbatch that failed, if the plan says so. Returns why the run stops and how to replay it."""
    culprit = error.culprit
    if culprit is None or job.plan.recovery.record == "none":
        return str(error)
    try:
        folder = _record(job, executor, queues, culprit, str(error), run, incarnation)
    except (OSError, Unsaveable, BrokerError, TimeoutError) as problem:
        return f"{error}\nThe microbatch could not be recorded: {problem}"
    stage, microbatch = culprit.action.stage, culprit.action.microbatch
    place = f"--stage {stage} --step {culprit.step} --microbatch {microbatch}"
    return f"{error}\nIt is recorded. To run it again, alone: stageline replay {quote(str(folder))} {place}"


def _record(
    job: Job, executor: Executor, queues: Queues, culprit: Culprit, reason: str, run: str, incarnation: int
) -> Path:
    """Returns the run's folder."""
    stage, step, microbatch, plan = culprit.action.stage, culprit.step, culprit.action.microbatch, job.plan
    records = RecordDirectory(runs.folder(plan, run), stage)
    folder = records.bad(step, microbatch)
    draft = draft_of(folder)
    try:
        draft.mkdir(parents=True)
        snapshot = Snapshot(stage, step, incarnation, executor.stages[stage].state())
        write_snapshot(draft, snapshot, Origin(run, plan.digest()))
        with (draft / MESSAGES).open("wb") as file:
            for message in _messages(queues, _inputs(job, culprit.action), step, microbatch):
                write_entry(file, Direction.TAKEN, encode(message))
            if culprit.gave is not None and (key := output_key(culprit.action)) is not None:
                number = message_number(step, microbatch, job.schedule.microbatches)
                place = run, key.flow, step, microbatch, key.stage, incarnation, number
                write_entry(file, Direction.GIVEN, encode(Message(*place, culprit.gave))[:1])
        sync(draft / MESSAGES)
        write_json(draft / REASON, Reason(action=str(culprit.action), raised=culprit.gave is None, reason=reason))
        records.describe(run, plan)
        shutil.rmtree(folder, ignore_errors=True)
        publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return records.run


def _inputs(job: Job, action: Action) -> tuple[QueueKey, ...]:
    """The queues from which the stage took the microbatch up to `action`."""
    forward = job.route.takes(Action(Kind.FORWARD, action.stage, action.microbatch))
    return forward if action.kind is Kind.FORWARD else forward + job.route.takes(action)


def _messages(queues: Queues, keys: Iterable[QueueKey], step: int, microbatch: int) -> list[Message]:
    """Raises `TimeoutError`, and what `take` raises."""
    deadline = monotonic() + LONGEST
    return [_taken_again(queues, key, step, microbatch, deadline) for key in keys]


def _taken_again(queues: Queues, key: QueueKey, step: int, microbatch: int, deadline: float) -> Message:
    inbound = queues.inbound(key)
    inbound.rewind(step)
    while (left := deadline - monotonic()) > 0:
        message = inbound.take(min(left, PATIENCE))
        if message is not None and (message.step, message.microbatch) == (step, microbatch):
            return message
    raise TimeoutError(f"{key} did not deliver it again within {LONGEST:g} s")
