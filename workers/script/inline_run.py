"""A script's run in its own process: all workers take turns in the script's thread, over queues in memory.

Used for debugging, and where no process may be started: a breakpoint in a layer's forward stops right there.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stageline.pipeline.feature import Feature
from stageline.pipeline.model.plan_stage import groups_of, lr_scheduler_of, optimizer_of, steps_between
from stageline.pipeline.model.segment import Segment, part_of
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Program, Queue
from stageline.pipeline.stage.layers.passage import generators_kept
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.saved import NotSaved
from stageline.workers.process.in_process import SharedQueues, take_turns
from stageline.workers.runtime.call_sequence import QueuedCalls
from stageline.workers.runtime.calls import Call, CallFeed, Position, answers
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import coded_queue
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.losses import ComputeFailed

from .arguments import LineOptions
from .calls.calls import CallLog, Replies, WeightNames, messages
from .calls.page import Timetable, planned
from .checks import demand_default_device

RUN = "line"


class InlineRun:
    """Run of the stages of `segments` in this thread. `submit` computes, and raises `ComputeFailed`."""

    cannot_save = "an inline line saves no checkpoints: leave out workers, or keep its state_dict()"

    def __init__(
        self,
        segments: Sequence[Segment],
        program: Program,
        names: WeightNames,
        options: LineOptions,
        plan: Plan,
    ) -> None:
        """Make the workers and their stages.

        Args:
            segments: Stages of the model, in order.
            program: Program of the workers.
            names: Names of the weights that each worker has.
            options: Arguments of the line.
            plan: Plan of the run.
        """
        self._plan = plan
        self.folder: Path | None = None
        schedule = program.schedule
        self.size = len(schedule.placement)
        self._names = names
        self._program = program.requeued(partial(coded_queue, plan, schedule))
        self._queues = SharedQueues(self._program, RUN)
        self._threads, self._devices = options.threads, {*map(torch.device, options.devices)}
        self._calls = CallLog(Position())
        self._broken = ""
        self._executors = [self._executor(worker, segments, options) for worker in range(self.size)]
        calls = QueuedCalls(self._program)
        self._workers = [
            WorkerLoop(calls, index, executor, self._queues, run=RUN, incarnation=1)
            for index, executor in enumerate(self._executors)
        ]

    @property
    def position(self) -> int:
        """Number of training steps called so far."""
        return self._calls.position.step

    def submit(self, call: Call) -> "Future[Replies]":
        """Carry out a call and return its replies, which are already there.

        Raises:
            ComputeFailed: The call failed, or an earlier one did: messages of that remain in the queues.
        """
        if self._broken:
            raise ComputeFailed(f"this line cannot go on: an earlier call failed ({self._broken}). Make a new one")
        demand_default_device()
        try:
            with _threads(self._threads), generators_kept(*self._devices):
                return self._carry_out(self._calls.numbered(call))
        except BaseException as error:  # Ctrl-C too: messages of the call remain in the queues
            self._broken = str(error) or type(error).__name__
            raise

    def close(self) -> None:
        """Close the queues."""
        self._queues.close()

    def save(self, folder: Path, call: Callable[[str], Replies]) -> None:
        """Raise `NotSaved`: an inline run saves no checkpoints."""
        raise NotSaved(self.cannot_save)

    def of_fit(self, number: int) -> None:
        """Return None: an inline run is not resumed, so that no batch of a fit is to be compared."""

    def waits_for(self) -> str:
        """Return "": an inline run waits for nothing."""
        return ""

    def news(self) -> list[str]:
        """Return no news: an inline run loses no workers."""
        return []

    def workers(self) -> list[str]:
        """Return one line for each worker, with its stages."""
        placement = enumerate(self._program.schedule.placement)
        return [f"worker {index}, stage {', '.join(map(str, owned))}, in this thread" for index, owned in placement]

    def timetable(self) -> Timetable:
        """Return the timetable of the plan: inline, all workers compute in turn."""
        return planned(self._program.schedule)

    def panels(self) -> str:
        """Return "": there is no broker, and there are no records."""
        return ""

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return copies of the weights by name, on the CPU; with `ema`, their averages."""
        parts = (stage.state_dict(ema=ema) for executor in self._executors for stage in executor.stages.values())
        return {name: tensor.detach().cpu().clone() for part in parts for name, tensor in part.items()}

    def abort(self, reason: str, *, knows_failure: bool = False, interrupted: bool = False) -> None:
        """Close the queues; the arguments have no effect inline."""
        self._queues.close()

    def discard(self) -> None:
        """Close the queues."""
        self._queues.close()

    def _carry_out(self, call: Call) -> "Future[Replies]":
        for message in messages(call, self._program, self._names, RUN, 1):
            self._queues.outbound(self._program.queues[message.queue]).put(message)
        take_turns(self._workers, lambda worker: worker.calls > call.number)
        replies = {queue.producer: self._reply(queue) for queue in answers(self._program, call.kind)}
        self._queues.trim(self._calls.position)  # nothing before this call is needed again
        for worker in self._workers:
            worker.progress.steps.clear()
        done: Future[Replies] = Future()
        done.set_result(replies)
        return done

    def _reply(self, queue: Queue) -> Tree:
        message = self._queues.inbound(queue).take(0)
        return None if message is None else message.payload

    def _executor(self, worker: int, segments: Sequence[Segment], options: LineOptions) -> Executor:
        schedule, device = self._program.schedule, self._plan.workers[worker].device
        replicas = schedule.replicas
        stages = {
            copy: self._stage(part_of(segments, copy, replicas), options, device) for copy in schedule.placement[worker]
        }
        feed = CallFeed(self._plan.schedule.microbatches, self._plan.schedule.accumulate)
        return Executor(stages, feed, self._program.last, options.named_metrics, replicas=replicas)

    def _stage(self, part: Segment, options: LineOptions, device: str) -> Stage:
        """Return the stage that computes `part`; only the last has a loss. Raises `ModelRefused` for its weights."""
        part.load()
        return part.stage(
            optimizer=optimizer_of(self._plan),
            loss=options.loss if part.index == self._program.last else None,
            features=[each if isinstance(each, Feature) else each() for each in options.features],
            settings=StageSettings(
                seed=options.seed,
                lr_scheduler=lr_scheduler_of(self._plan),
                lr_every=steps_between(self._plan.lr_scheduler, 0),
                device=device,
                clip_norm=options.clip_norm,
                ema_decay=options.ema_decay,
                autocast=options.autocast,
                recompute=self._plan.recompute_of(part.index),
                groups=groups_of(self._plan),
            ),
        )


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    """Return a context that computes with `threads` threads; afterwards the script's own number is restored.

    The result of a computation depends on the number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
