"""The process of one worker from start to end: it loads the plan, gets its place from the broker, and does its work.

prepare -> join -> open the queues -> restore the checkpoint -> `CommandHandler.run` -> exit code
"""

import gc
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from stageline.broker.control.messages import CONTROL_VERSION, Hello
from stageline.broker.control.records import LONGEST_NAME
from stageline.broker.ledger.losses import Leases
from stageline.pipeline.errors import (
    ExitCode,
    ModelRefused,
    StagelineError,
    cause_of,
    traceback_text,
)
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.copies import copy_groups
from stageline.pipeline.process.lifeline import NONE, Lifeline
from stageline.pipeline.process.signals import Signals, exit_at_once, leave_at_once
from stageline.pipeline.program import Neighbours, neighbours_of
from stageline.workers.checkpoint.inventory import LocalSnapshots
from stageline.workers.control.alive import Pulse
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.joining import NotAdmitted, Stopped, WorkerIdentity
from stageline.workers.control.party_trust import trust_of
from stageline.workers.disk.memory import give_back_memory, keep_freed_memory
from stageline.workers.disk.owned_folder import OwnedFolder
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.losses import ComputeFailed

from .join import tell_script, why_not_own
from .worker import Worker, WorkerOptions, lacks_resources, why_it_leaves

EVENTS: dict[int, str] = {ExitCode.NOT_ADMITTED: "refused", ExitCode.REFUSED: "refused"}

log = structlog.get_logger()


def run_worker(plan: Plan, options: WorkerOptions) -> int:
    """Run one worker to the end of the run; return the exit code. A reason to stop early is logged and reported.

    Once the worker is assigned, SIGINT and SIGTERM end it between two actions, with exit code 130. With
    `options.notice`, SIGTERM has it leave at the end of a step, with exit code 76.

    Raises:
        NotAdmitted: The broker has no place for a worker with `options.joined`: another run may begin there.
    """
    try:
        code = _run(_anchored(plan), options)
        options.over()  # the process may yet hang, or be killed, before it exits
        return code
    except NotAdmitted as refusal:
        if refusal.over and not options.joined:
            options.over()
        if options.joined:
            raise
        log.error("stopped", reason=str(refusal))
        return refusal.exit_code
    except Stopped as stop:
        if stop.over:
            options.over()
        meant = stop.exit_code in (ExitCode.OK, ExitCode.LEFT)
        (log.info if meant else log.error)("stopped", reason=str(stop))
        _tell_refusal(stop, stop.exit_code, options)
        return stop.exit_code
    except Exception as error:
        if lacks_resources(error):  # another process may do better: no code that says that the plan cannot work
            log.error("failed", reason=why_it_leaves(error))
            return ExitCode.FAILED
        if not isinstance(error, StagelineError):
            raise
        event = EVENTS.get(error.exit_code, "failed")
        # A traceback helps where the user's own code raised; every other expected error explains itself.
        cause = cause_of(error) if isinstance(error, ComputeFailed) else None
        raised = "" if cause is None else traceback_text(cause)
        log.error(event, reason=str(error), exception=raised)
        _tell_refusal(error, error.exit_code, options)
        return error.exit_code


def _tell_refusal(error: Exception, code: int, options: WorkerOptions) -> None:
    """Tell the script if a worker of it on another machine cannot begin."""
    if options.joined and code == ExitCode.REFUSED:
        tell_script(options.broker, error, options.pair)


def _anchored(plan: Plan) -> Plan:
    """Return the plan with absolute paths: the user's code may change the current folder."""
    run = plan.run.model_copy(update={"dir": plan.run.dir.absolute()})
    return plan.model_copy(update={"run": run, "file": None if plan.file is None else plan.file.absolute()})


def _run(plan: Plan, options: WorkerOptions) -> int:
    lifeline = Lifeline(options.lifeline, ends_run=not options.standing_in)
    lifeline.end_process_when_cut()
    if plan.data.stays is not None and options.claim is None and options.lifeline == NONE:
        raise Stopped(  # a process for any place opens all data; those that `train` starts are on its own machine
            f"the plan has data.stays = {list(plan.data.stays)}: say which worker this process is, with --index, so "
            "that it opens no data but that worker's",
            ExitCode.USAGE,
        )
    if options.notice is not None:
        Signals(leave_at_once)
    pulse = Pulse(options.alive, Leases(plan.recovery.lease, plan.recovery.longest_action, plan.recovery.loading))
    pulse.load()
    plan.demand_memory()
    job = prepare(plan, worker=options.claim)
    if options.spare:
        warm_up(job.plan, options.claim)
    job = replace(job, neighbours=_neighbours(job.plan))
    count = len(job.plan.workers)  # the broker knows one place more in a scripted run: the script's
    if options.claim is not None and options.claim >= count:
        raise Stopped(f"there is no worker {options.claim}: the plan has workers 0 to {count - 1}", ExitCode.USAGE)
    _require_weights(job, options.claim)
    length = {"length": job.length, "needs_length": job.length is None and not plan.scripted}
    near = job.neighbours if options.claim is not None else ()
    holds = [stage for at, others in enumerate(near) if options.claim in others for stage in job.schedule.placement[at]]
    why_not = partial(why_not_own, job.plan) if options.joined else (lambda run: None)
    identity = identity_of(job.plan, options.name, options.claim, why_not, holds=holds, spare=options.spare, **length)
    trust = trust_of(job.plan, options.pair)
    control = ControlThread(options.broker, identity, options.pair, trust=trust, pulse=pulse, lifeline=lifeline)
    try:
        assigned = control.join(options.broker_timeout, workers_timeout=options.workers_timeout)
        pulse.load()
        if assigned.index >= count:
            reason = f"the broker gave place {assigned.index} of a plan with {count} workers"
            raise Stopped(reason, ExitCode.FAILED)
        job = replace(job, length=job.length or assigned.length).only(job.schedule.placement[assigned.index])
        gc.collect()  # the model may refer to itself
        _keep_memory(job.plan, assigned.index)  # from here on: what loading has freed goes back
        _exit_on_signals(control, options.notice)  # not before: until here, a signal may end the process at once
        log.info(
            f"assigned: this process is worker {assigned.index} of run {assigned.run}, known to the broker by the "
            f"incarnation {assigned.incarnation}; a replacement has a higher one"
        )
        torch.set_num_threads(job.plan.workers[assigned.index].threads)
        with ExitStack() as stack:
            own = stack.enter_context(OwnedFolder()).path if options.sockets is None else options.sockets
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-", dir=own))
            Worker(stack, job, assigned, control, options, Path(folder)).run()
    finally:
        control.close()
    return ExitCode.OK


def _neighbours(plan: Plan) -> Neighbours:
    """Return the workers that may hold copies of each worker's snapshots; none if this process copies none."""
    return neighbours_of(len(plan.workers), copy_groups(plan)) if plan.recovery.copies else ()


def _require_weights(job: Job, claim: int | None) -> None:
    """Raise `ModelRefused` if the weights of no claimed place can be loaded.

    This runs before the process has a place: refusing it later would end the run. Files may have the weights of some
    places only.
    """
    refused: list[ModelRefused] = []
    for stages in job.schedule.placement if claim is None else [job.schedule.placement[claim]]:
        try:
            for stage in stages:
                job.segments[job.schedule.replicas.stage(stage)].check()
            return
        except ModelRefused as error:
            refused.append(error)
    raise refused[0]


def _keep_memory(plan: Plan, worker: int) -> None:
    """Keep freed memory, which is faster, or give it back where memory is scarce: with offload or a tight limit."""
    if plan.is_scarce(worker):
        give_back_memory()
    else:
        keep_freed_memory()


def _exit_on_signals(control: ControlThread, notice: float | None) -> None:
    """Have the first signal end the compute loop between two actions, and the second end the process at once.

    With a `notice` in seconds, the first SIGTERM has the worker leave instead.
    """

    def interrupt(number: int) -> None:
        if notice is not None and number == signal.SIGTERM:
            control.leave(notice, "SIGTERM")
            return
        control.command(Stopped(f"interrupted by {signal.Signals(number).name}", ExitCode.INTERRUPTED))

    Signals(interrupt, exit_at_once)


def identity_of(
    plan: Plan,
    name: str,
    claim: int | None,
    why_not: Callable[[str], str | None] = lambda run: None,
    *,
    holds: Collection[int] = (),
    **own: Any,
) -> WorkerIdentity:
    """Return how this process introduces itself to the broker of a run of `plan`.

    Args:
        plan: Plan of the run.
        name: Name for reports.
        claim: Index of the place that the process wants. None for any.
        why_not: Returns why a run that the broker names cannot be this process's, None if it can.
        holds: Stages whose snapshots may be here as copies.
        own: Further fields of its `Hello`.
    """
    who = name[:LONGEST_NAME], socket.gethostname(), os.getpid(), ""
    token = secrets.token_hex(16)
    hello = Hello(CONTROL_VERSION, plan.digest(), *who, claim, settings=plan.as_mapping(), token=token, **own)
    return WorkerIdentity(hello, LocalSnapshots(plan, holds) if plan.recovery.on else None, why_not)


def warm_up(plan: Plan, worker: int | None) -> None:
    """Prepare this process to compute as `worker` of the plan, or as any worker if that is None.

    The first step of the first optimizer loads torch's compiler, which takes seconds; the first forward and backward
    on a device start its libraries. A device that this machine lacks is skipped, and so is a GPU of a group, whose
    processes are forked later: no fork can use a GPU that was used before.
    """
    mine = plan.workers if worker is None else plan.workers[worker : worker + 1]
    torch.set_num_threads(mine[0].threads if mine else 1)
    grouped = [each for each in mine if any(plan.stage_plan(stage).processes > 1 for stage in each.stages)]
    for device in sorted({each.device for each in mine if each.device == "cpu" or each not in grouped}):
        with suppress(RuntimeError, AssertionError):  # torch asserts that it was built for the device
            warm_up_device(device)


def warm_up_device(device: str) -> None:
    """Run one training step of a small layer on `device`."""
    layer = torch.nn.Linear(8, 8, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.zeros(2, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
