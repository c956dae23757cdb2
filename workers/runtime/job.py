"""A plan with its model and data, from which every process of a run derives segments, schedule, program and batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_queue

from stageline.broker.control.records import RunLength, ScheduleOrder
from stageline.pipeline.data import Feed, Numbering
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.features.offload import Offload, in_memory
from stageline.pipeline.model.cut import build_segments, first_trainable, frozen_stages
from stageline.pipeline.model.load import (
    base_folder,
    demand_features,
    load_features,
    load_function,
)
from stageline.pipeline.model.plan_stage import demand_matched, demand_recomputable, make_stage, tapped_layers
from stageline.pipeline.model.segment import Segment, part_of
from stageline.pipeline.model.side_effects import demand_replicable
from stageline.pipeline.model.split import demand_splits
from stageline.pipeline.model.ties import ties_of
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.keys.models import function_of, numbered
from stageline.pipeline.plan.staying import sharing_abroad
from stageline.pipeline.program import (
    Costs,
    Evaluation,
    Instruction,
    Neighbours,
    NormClipping,
    Pass,
    Program,
    Queue,
    Replays,
    ScriptCalls,
    SnapshotCopies,
    SumExchange,
    TiedStages,
    Verdict,
    compile_program,
)
from stageline.pipeline.schedule import Schedule
from stageline.pipeline.stage.stage import Stage

from .call_sequence import QueuedCalls
from .calls import CallFeed
from .executor import Executor, Metric, MicrobatchSource
from .feature_pass import FeaturePass, check_lowered, demand_handlers
from .job_data import has_an_end, loader_for, steps_of_epoch, steps_of_epochs
from .orders import StepOrders
from .plan_calls import ENDLESS, NO_ROUNDS, PlanCalls
from .prefix import cached_stages, demand_prefix, made_order, order_of
from .rounds import batches_to_evaluate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The queues that have codecs, and under which name of the plan
_CODED = {"forward": "forward", "evaluation": "forward", "backward": "backward"}


@dataclass(frozen=True)
class Job:
    """A plan that has met its model and, where they are needed, its data. `plan` has its stages and workers filled in.

    `passes` are what the model and the plan add to every step of the `schedule`. A process that computes neither the
    first stage nor the last has no `own_feed`, and learns the run's `length` from the broker. `neighbours` of
    each worker may hold copies of its snapshots.
    """

    plan: Plan
    segments: Sequence[Segment]
    schedule: Schedule
    passes: tuple[Pass, ...]
    verdict: Verdict
    length: RunLength | None
    own_feed: Feed | None = None
    neighbours: Neighbours = ()

    @property
    def steps(self) -> int:
        """The number of training steps. Raises `DataError` if neither the data nor the broker has told it."""
        return self.known_length.training

    @property
    def training_steps(self) -> int | None:
        """The number of training steps; None if only the script knows."""
        return self.steps

    @property
    def feed(self) -> Feed:
        """The plan's batches. Raises `DataError` in a process without data, and `ModelRefused` in a scripted run."""
        if self.own_feed is None:
            raise DataError("this process computes neither the first stage nor the last: it has no data")
        return self.own_feed

    @property
    def known_length(self) -> RunLength:
        """The length of the run. Raises `DataError` if neither the data nor the broker has told it."""
        if self.length is None:
            raise DataError("the broker did not say how many steps the run has, and this process has no data that do")
        return self.length

    def with_data(self, doing: Callable[[str], None] = lambda what: None, *, worker: int | None = None) -> "Job":
        """Return the job with its data, all or what `worker` needs; they tell its length. Raises `ModelRefused`."""
        plan = self.plan
        doing(plan.data.origin)
        source = loader_for(plan, self.schedule, worker)(plan)
        steps = plan.run.steps if plan.run.steps is not None else steps_of_epochs(plan, source.steps_per_epoch)
        keep = len(self.segments) + 2
        choice = plan.schedule
        feed = Feed(source, choice.microbatches, steps, plan.data.batch_size, accumulate=choice.accumulate, keep=keep)
        epoch = steps_of_epoch(plan, source.steps_per_epoch) if plan.counts_epochs else 0
        length = RunLength(steps, batches_to_evaluate(plan, feed.batches_held_out), epoch, order_of(plan, feed))
        return replace(self, own_feed=feed, length=length)

    def only(self, copies: Iterable[int]) -> "Job":
        """Return the job without the layers of stages other than `copies`, whose memory is freed unless still held.

        Stages whose rows are kept stay, too: they run again where their rows are lost.
        """
        stages = map(self.schedule.replicas.stage, copies)
        kept = {*stages, *cached_stages(self.plan, self.schedule.first_trainable)}
        segments = [part if part.index in kept else replace(part, layers=()) for part in self.segments]
        return replace(self, segments=segments)

    def executor(
        self,
        stages: Iterable[int],
        *,
        make: Callable[[int, Offload], Stage] | None = None,
        offload: Callable[[int], Offload] = in_memory,
    ) -> Executor:
        """Return the stages with data and metrics.

        Raises `ModelRefused` for a wrong optimizer or loss, and `FeatureRefused` for an operation without a handler.

        Args:
            stages: Copies that are made.
            make: Makes a copy; by default, `stage` does.
            offload: Returns the parts of a stage that lie outside of the worker's memory.
        """
        make = make or (lambda copy, offload: self.stage(copy, offload=offload))
        made = {copy: make(copy, offload(self.schedule.replicas.stage(copy))) for copy in stages}
        parts = made, self._source_of_microbatches, self.program.last, self.metrics
        executor = Executor(*parts, ema=self._evaluates_averages, replicas=self.schedule.replicas)
        demand_handlers(self.program, executor.computes.keys())
        return executor

    @cached_property
    def program(self) -> Program:
        """The operations of each worker, with the windows and codecs of queues."""
        criterion = self.plan.criterion or Criterion()
        passes = (
            *self.passes,
            *self._passes_of_calls,
            *Evaluation.of(self.rounds.batches, is_told=criterion.is_told),
            *Replays.of(self.replayed_from),
            *((SnapshotCopies(self.neighbours),) if self.neighbours else ()),
        )
        made = compile_program(self.schedule, passes)
        return made.requeued(lambda queue: replace_queue(queue, window=queue.window or self._bound(queue))).requeued(
            lambda queue: coded_queue(self.plan, self.schedule, queue)
        )

    @property
    def calls(self) -> PlanCalls | QueuedCalls:
        """The calls of the run: those that the plan's steps and rounds make, or a script's."""
        return PlanCalls(self.program, self.rounds, self.plan.criterion or Criterion())

    def calls_by(self, orders: Sequence[ScheduleOrder], closed: int | None, start: int) -> PlanCalls | QueuedCalls:
        """Return the calls to a worker from step `start` on, by the `orders`; steps from `closed` on wait for more."""
        calls = self.calls
        if isinstance(calls, PlanCalls) and self.plan.schedule.is_auto:
            return replace(calls, orders=StepOrders(orders, closed, start))
        return calls

    @property
    def replayed_from(self) -> int | None:
        """The step from which on the output of frozen first stages is replayed; None if it is computed each time."""
        epoch = self.known_length.epoch if self.plan.caches_prefix else None
        return None if epoch is None or epoch >= self.steps else epoch

    @property
    def numbering(self) -> Numbering | None:
        """The numbers of the samples in each microbatch; None if neither the data nor the broker has told them."""
        order, choice = self.known_length.order, self.plan.schedule
        if order is not None:
            return Numbering(made_order(order).rows, choice.microbatches, choice.accumulate)
        return None if self.own_feed is None else self.own_feed.numbering

    @property
    def tapped(self) -> dict[int, tuple[str, ...]]:
        """The names of the layers whose outputs are stored, by stage."""
        return tapped_layers(self.plan, self.segments)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The metrics by the functions' names."""
        folder = base_folder(self.plan)
        metrics = (load_function(name, folder, "model.metrics") for name in self.plan.model.metrics)
        return dict(zip(self._metric_titles, metrics, strict=True))

    @property
    def rounds(self) -> Rounds:
        """The rounds of evaluation of the rows held out. A scripted run has none: its script calls for evaluation."""
        length, choice = self.known_length, self.plan.evaluation
        every = None if choice is None else choice.every
        return Rounds(length.training, length.evaluation, length.epoch if every == "epoch" else every)

    def reads_data(self, worker: int | None) -> bool:
        """Return True if the process of `worker` reads data; None stands for a process that needs all of them."""
        return has_an_end(self.schedule, worker)

    def runs_once(self, instruction: Instruction) -> bool:
        """Return True if no checkpoint brings a worker back to `instruction` after its call has been answered."""
        return False

    @property
    def _source_of_microbatches(self) -> MicrobatchSource | None:
        return self.own_feed

    @property
    def _evaluates_averages(self) -> bool:
        return self.plan.averages

    @property
    def _epoch(self) -> int:
        return self.known_length.epoch if self.plan.counts_epochs else 0

    @property
    def _passes_of_calls(self) -> tuple[Pass, ...]:
        return ()

    @property
    def _metric_titles(self) -> Sequence[str]:
        return self.plan.metric_names

    def _bound(self, queue: Queue) -> int:
        """Return a window of about twice the schedule's most, and of at least a step's messages beyond it."""
        # So credit is granted again before it runs out, and not all the time. The schedule bounds what waits,
        # except after a recovery.
        most, microbatches = self.verdict.queue_bound[queue.name], self.schedule.microbatches
        if self.plan.schedule.is_auto:  # it may take any schedule: none puts more than a step's
            most = max(most, microbatches)
        return max(2 * most + 2, most + microbatches)

    def device_of(self, copy: int) -> str:
        """Return the device that the plan has for `copy`; of several processes, the first one's."""
        return self.plan.workers[self.schedule.owner(copy)].device

    def stage(
        self,
        copy: int,
        *,
        device: str | None = None,
        mesh: "DeviceMesh | None" = None,
        offload: Offload | None = None,
    ) -> Stage:
        """Make a stage, or a replica, by default on the plan's device; `mesh` and `offload` go to `make_stage`.

        Raises `ModelRefused` for a wrong optimizer or loss.
        """
        part = part_of(self.segments, copy, self.schedule.replicas)
        return make_stage(
            self.plan,
            part,
            last=part.index == self.schedule.stages - 1,
            device=device or self.device_of(copy),
            stash_weights=self.schedule.mode == "async" and self.verdict.stage_peak[copy] > 1,
            delay_weights=self.schedule.delays,
            epoch=self._epoch,
            mesh=mesh,
            offload=offload or Offload(),
        )


class ScriptJob(Job):
    """Job of a scripted run: its steps are `ENDLESS`, and its batches come with the script's calls."""

    @property
    def steps(self) -> int:
        """`ENDLESS`."""
        return ENDLESS

    @property
    def training_steps(self) -> None:
        """None: only the script knows."""
        return None

    @property
    def feed(self) -> Feed:
        """Raises `ModelRefused`: there are no batches beforehand."""
        raise ModelRefused("the batches of this run come from a script, call by call: there are none beforehand")

    @property
    def calls(self) -> QueuedCalls:
        """The calls of the script."""
        return QueuedCalls(self.program)

    @property
    def rounds(self) -> Rounds:
        """No rounds of evaluation: the script calls for it."""
        return NO_ROUNDS

    def reads_data(self, worker: int | None) -> bool:
        """Return False: no process of the run reads data."""
        return False

    def runs_once(self, instruction: Instruction) -> bool:
        """Return True for evaluation, which the script calls for."""
        return instruction.evaluates

    @property
    def _source_of_microbatches(self) -> CallFeed:
        return CallFeed(self.plan.schedule.microbatches, self.plan.schedule.accumulate)

    @property
    def _evaluates_averages(self) -> bool:
        return False  # the script says of each call which weights it measures

    @property
    def _epoch(self) -> int:
        return 0  # the script says of each step how many an epoch has

    @property
    def _passes_of_calls(self) -> tuple[Pass, ...]:
        return ScriptCalls.with_evaluation()

    @property
    def _metric_titles(self) -> Sequence[str]:
        return numbered([function_of(name) for name in self.plan.model.metrics])  # the same wherever its workers are


def coded_queue(plan: Plan, schedule: Schedule, queue: Queue) -> Queue:
    """Return `queue` with its codec, one for all replicas. Evaluated batches use it: what is measured is what runs."""
    if queue.flow not in _CODED or queue.target is None:
        return queue
    return replace_queue(queue, codec=plan.queues.codec_of(_CODED[queue.flow], schedule.replicas.stage(queue.target)))


def prepare(plan: Plan, doing: Callable[[str], None] = lambda what: None, *, worker: int | None = None) -> Job:
    """Load the plan's model and, for a process that reads data, the data. `doing` is told what is loaded next.

    No data are loaded for a script's workers, nor for a `worker` that computes neither the first stage nor the last.
    Raises `PlanRefused` or `ModelRefused` if they cannot be trained as planned.
    """
    job = prepare_model(plan, doing)
    return job.with_data(doing, worker=worker) if job.reads_data(worker) else job


def prepare_model(plan: Plan, doing: Callable[[str], None] = lambda what: None) -> Job:
    """Load the plan's model, without the data. `doing` and errors are those of `prepare`."""
    doing(f'model.factory = "{plan.model.factory}"')
    segments = build_segments(plan)
    demand_features(plan)
    demand_matched(plan, segments)
    demand_splits(plan, segments)
    tapped_layers(plan, segments)
    demand_recomputable(plan, segments)
    plan = plan.resolved(len(segments))
    demand_replicable(plan, segments)
    schedule, passes = schedule_of(plan, segments), passes_of(plan, segments)
    program = compile_program(schedule, passes)
    if reason := sharing_abroad(plan, program):
        raise plan.refused("data.stays", reason)
    demand_prefix(plan, segments, schedule.first_trainable)
    told = plan.run.steps is None or plan.evaluates or plan.counts_epochs  # by the data
    length = None if told else RunLength(plan.run.steps or 0, 0)
    verdict = check_lowered(program, Costs.even(schedule.stages, frozen=frozen_stages(segments)))
    kind = ScriptJob if plan.scripted else Job
    return kind(plan, segments, schedule, passes, verdict, length)


def schedule_of(plan: Plan, segments: Sequence[Segment]) -> Schedule:
    """Return the plan's schedule for the stages of `segments`. Raises `ScheduleRefused`."""
    return plan.make_schedule(first_trainable=first_trainable(segments))


def passes_of(plan: Plan, segments: Sequence[Segment]) -> tuple[Pass, ...]:
    """Return what the model and the plan add to every step of the plan's schedule. Raises `ModelRefused`."""
    ties = TiedStages(ties_of(segments, plan.schedule.mode), plan.schedule.tied)
    sums = SumExchange(tuple(frozen_stages(segments)))
    return (ties, *NormClipping.of(plan.optimizer.clip_norm), sums, *map(FeaturePass, load_features(plan)))


def scripted_program(plan: Plan, segments: Sequence[Segment]) -> Program:
    """Return the program of a script's workers. Raises `ModelRefused`, and `ScheduleRefused`."""
    return compile_program(schedule_of(plan, segments), (*passes_of(plan, segments), *ScriptCalls.with_evaluation()))
