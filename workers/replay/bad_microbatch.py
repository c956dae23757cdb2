"""Keeps the microbatch that stops a run, so that it can be run again alone: its messages, and the state of the stage.

Nothing is done for it before it is known to be bad. Its messages are still with their producers: the queues are
rewound, and deliver them once more.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from time import monotonic

from stageline.broker.codec.message import Message, encode
from stageline.broker.errors import BrokerError
from stageline.broker.queues.base import QueueKey, Queues
from stageline.pipeline.schedule import Action, Kind
from stageline.workers.checkpoint.manifest import Origin
from stageline.workers.checkpoint.snapshot import Snapshot, write_snapshot
from stageline.workers.checkpoint.state_tree import Unsaveable
from stageline.workers.runs import folder as runs
from stageline.workers.runs.result import keep
from stageline.workers.runtime.executor import ComputeFailed, Culprit, Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import PATIENCE

from .capture import gives
from .directory import MESSAGES, REASON, Reason, RecordDirectory
from .record_file import Direction, write_entry

LONGEST = 5.0  # seconds that the producers get to deliver the messages again


def told(job: Job, executor: Executor, queues: Queues, error: ComputeFailed, run: str, incarnation: int) -> str:
    """Why the run stops, and how its bad microbatch, which is kept if the plan wants it, is run again."""
    culprit = error.culprit
    if culprit is None or job.plan.recovery.record == "none":
        return str(error)
    try:
        folder = _keep(job, executor, queues, culprit, str(error), run, incarnation)
    except (OSError, Unsaveable, BrokerError, TimeoutError) as problem:
        return f"{error}\nThe microbatch could not be recorded: {problem}"
    stage, microbatch = culprit.action.stage, culprit.action.microbatch
    place = f"--stage {stage} --step {culprit.step} --microbatch {microbatch}"
    return f"{error}\nIt is recorded. To run it again, alone: stageline replay {quote(str(folder))} {place}"


def _keep(
    job: Job, executor: Executor, queues: Queues, culprit: Culprit, reason: str, run: str, incarnation: int
) -> Path:
    """Returns the run's folder."""
    stage, step, plan = culprit.action.stage, culprit.step, job.plan
    records = RecordDirectory(runs.folder(plan, run), stage)
    folder = records.bad(step, culprit.action.microbatch)
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    state = executor.stages[stage].state()
    write_snapshot(draft, Snapshot(stage, step, incarnation, state), Origin(run, plan.digest()))
    with (draft / MESSAGES).open("wb") as file:
        for message in _messages(queues, _taken(job, culprit.action), step, culprit.action.microbatch):
            write_entry(file, Direction.TAKEN, encode(message))
        if culprit.gave is not None and (key := gives(culprit.action)) is not None:
            number = step * job.schedule.microbatches + culprit.action.microbatch
            place = run, key.flow, step, culprit.action.microbatch, key.stage, incarnation, number
            write_entry(file, Direction.GIVEN, encode(Message(*place, culprit.gave))[:1])
    keep(draft, REASON, Reason(action=str(culprit.action), raised=culprit.gave is None, reason=reason))
    records.describe(run, plan)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return records.run


def _taken(job: Job, action: Action) -> tuple[QueueKey, ...]:
    """The queues from which the stage took the microbatch up to `action`."""
    forward = job.route.takes(Action(Kind.FORWARD, action.stage, action.microbatch))
    return forward if action.kind is Kind.FORWARD else forward + job.route.takes(action)


def _messages(queues: Queues, keys: Iterable[QueueKey], step: int, microbatch: int) -> list[Message]:
    """Raises `TimeoutError`, and what `take` raises."""
    deadline = monotonic() + LONGEST
    return [_again(queues, key, step, microbatch, deadline) for key in keys]


def _again(queues: Queues, key: QueueKey, step: int, microbatch: int, deadline: float) -> Message:
    inbound = queues.inbound(key)
    inbound.rewind(step)
    while (left := deadline - monotonic()) > 0:
        message = inbound.take(min(left, PATIENCE))
        if message is not None and (message.step, message.microbatch) == (step, microbatch):
            return message
    raise TimeoutError(f"{key} did not deliver it again within {LONGEST:g} s")
