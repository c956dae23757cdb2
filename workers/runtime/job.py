"""A plan with its model and data, from which every process of a run derives segments, schedule, program and batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_queue

from stageline.broker.control.records import RunLength, ScheduleOrder
from stageline.pipeline.data import Feed, Numbering, Source
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.evaluation import Criterion, Rounds
from stageline.pipeline.features.offload import Offload, in_memory
from stageline.pipeline.model.cut import build_segments, first_trainable, frozen_stages
from stageline.pipeline.model.load import (
    base_folder,
    demand_features,
    load_features,
    load_function,
    load_inputs,
    load_source,
    load_targets,
)
from stageline.pipeline.model.plan_stage import demand_matched, demand_recomputable, make_stage, tapped_layers
from stageline.pipeline.model.segment import Segment
from stageline.pipeline.model.side_effects import demand_replicable
from stageline.pipeline.model.split import demand_splits
from stageline.pipeline.model.ties import ties_of
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.keys.models import function_of, numbered
from stageline.pipeline.program import (
    Costs,
    Evaluation,
    NormClipping,
    Pass,
    Program,
    Queue,
    Replays,
    ScriptCalls,
    SumExchange,
    TiedStages,
    Verdict,
    compile_program,
)
from stageline.pipeline.schedule import Schedule
from stageline.pipeline.stage.stage import Stage

from .call_sequence import QueuedCalls
from .calls import CallFeed
from .executor import Executor, Metric
from .feature_pass import FeaturePass, check_lowered, demand_handlers
from .orders import StepOrders
from .plan_calls import ENDLESS, NO_ROUNDS, PlanCalls
from .prefix import cached_stages, demand_prefix, made_order, order_of
from .staying import demand_staying

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The queues that have codecs, and under which name of the plan
_CODED = {"forward": "forward", "evaluation": "forward", "backward": "backward"}


@dataclass(frozen=True)
class Job:
    """A plan that has met its model and, where they are needed, its data. `plan` has its stages and workers filled in.

    `passes` are what the model and the plan add to every step of the `schedule`. A process that computes neither the
    first stage nor the last has no `own_feed`, and learns the run's `length` from the broker. In a scripted run `steps`
    is ENDLESS, and no process has a feed: batches come with the script's calls.
    """

    plan: Plan
    segments: Sequence[Segment]
    schedule: Schedule
    passes: tuple[Pass, ...]
    verdict: Verdict
    length: RunLength | None
    own_feed: Feed | None = None

    @property
    def steps(self) -> int:
        """The number of training steps. Raises `DataError` if neither the data nor the broker has told it."""
        return ENDLESS if self.plan.scripted else self.known_length.training

    @property
    def training_steps(self) -> int | None:
        """The number of training steps; None if only the script knows."""
        return None if self.plan.scripted else self.steps

    @property
    def feed(self) -> Feed:
        """The plan's batches. Raises `ModelRefused` in a scripted run, `DataError` in a process without data."""
        if self.plan.scripted:
            raise ModelRefused("the batches of this run come from a script, call by call: there are none beforehand")
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
        source = _loader_for(self, worker)(plan)
        steps = plan.run.steps if plan.run.steps is not None else _steps_of_epochs(plan, source.steps_per_epoch)
        keep = len(self.segments) + 2
        choice = plan.schedule
        feed = Feed(source, choice.microbatches, steps, plan.data.batch_size, accumulate=choice.accumulate, keep=keep)
        epoch = _steps_of_epoch(plan, source.steps_per_epoch) if plan.counts_epochs else 0
        if plan.evaluation is not None and not feed.batches_held_out:
            raise plan.refused(
                "evaluation" if plan.evaluation.every is None else "evaluation.every",
                f"there are no rows to evaluate: what {plan.data.origin} names holds none back. Have its held_out() "
                "return some, or leave the table [evaluation] out",
            )
        length = RunLength(steps, feed.batches_held_out if plan.evaluates else 0, epoch, order_of(plan, feed))
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
        choice = self.plan.schedule
        feed = CallFeed(choice.microbatches, choice.accumulate) if self.plan.scripted else self.own_feed
        ema = self.plan.averages and not self.plan.scripted  # a script says which weights each call measures
        parts = made, feed, self.program.last, self.metrics
        executor = Executor(*parts, ema=ema, replicas=self.schedule.replicas)
        demand_handlers(self.program, executor.computes.keys())
        return executor

    @cached_property
    def program(self) -> Program:
        """The operations of each worker, with the windows and codecs of queues."""
        criterion = self.plan.criterion or Criterion()
        passes = (
            *self.passes,
            *ScriptCalls.of(scripted=self.plan.scripted),
            *Evaluation.of(self.rounds.batches, criterion.patience),
            *Replays.of(self.replayed_from),
        )
        made = compile_program(self.schedule, passes)
        return made.requeued(lambda queue: replace_queue(queue, window=queue.window or self._bound(queue))).requeued(
            lambda queue: coded_queue(self.plan, self.schedule, queue)
        )

    @property
    def calls(self) -> PlanCalls | QueuedCalls:
        """The calls of the run: a script's, or the ones that the plan's steps and rounds make."""
        if self.plan.scripted:
            return QueuedCalls(self.program)
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
        """The metrics by the functions' names. A script numbers functions of one name, wherever its workers are."""
        names = self.plan.model.metrics
        titles = numbered([function_of(name) for name in names]) if self.plan.scripted else self.plan.metric_names
        folder = base_folder(self.plan)
        metrics = (load_function(name, folder, "model.metrics") for name in names)
        return dict(zip(titles, metrics, strict=True))

    @property
    def rounds(self) -> Rounds:
        """The rounds of evaluation of the rows held out. None in a scripted run: the script calls for it."""
        if self.plan.scripted:
            return NO_ROUNDS
        length, choice = self.known_length, self.plan.evaluation
        every = None if choice is None else choice.every
        return Rounds(length.training, length.evaluation, length.epoch if every == "epoch" else every)

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
        stage = self.schedule.replicas.stage(copy)
        part = self.segments[stage]
        if copy != stage:  # the workers of a run may be in one process, and replicas share no parameters
            part = replace(part, layers=deepcopy(part.layers))
        return make_stage(
            self.plan,
            part,
            last=stage == self.schedule.stages - 1,
            device=device or self.device_of(copy),
            stash_weights=self.schedule.mode == "async" and self.verdict.stage_peak[copy] > 1,
            delay_weights=self.schedule.delays,
            epoch=self.known_length.epoch if self.plan.counts_epochs else 1,
            mesh=mesh,
            offload=offload or Offload(),
        )


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
    return job.with_data(doing, worker=worker) if _reads_data(job, worker) else job


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
    demand_staying(plan, program)
    demand_prefix(plan, segments, schedule.first_trainable)
    told = plan.run.steps is None or plan.evaluates or plan.counts_epochs  # by the data
    length = None if told else RunLength(plan.run.steps or 0, 0)
    verdict = check_lowered(program, Costs.even(schedule.stages, frozen=frozen_stages(segments)))
    return Job(plan, segments, schedule, passes, verdict, length)


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
    return compile_program(schedule_of(plan, segments), (*passes_of(plan, segments), *ScriptCalls.of(scripted=True)))


def _steps_of_epochs(plan: Plan, batches: int) -> int:
    """Return the steps of the plan's epochs, of `batches` each. Raises `PlanRefused` if batches would be left."""
    every, of = (plan.run.epochs or 0) * batches, plan.schedule.accumulate
    if every % of:
        raise plan.refused(
            "run.epochs",
            f"{every} batches, {batches} in each, are no whole steps of schedule.accumulate = {of} batches; use "
            f"run.steps = {every // of or 1}, or a number of epochs that is a multiple of {of // gcd(of, batches)}",
        )
    return every // of


def _steps_of_epoch(plan: Plan, batches: int) -> int:
    """Return the steps of an epoch. Raises `PlanRefused` if a step has batches of two epochs."""
    if batches % plan.schedule.accumulate:
        raise plan.refused(
            _counting_epochs(plan),
            f"an epoch has {batches} batches, which are no whole steps of schedule.accumulate = "
            f"{plan.schedule.accumulate}; use {'another number' if plan.caches_prefix else 'a number of steps'}",
        )
    return batches // plan.schedule.accumulate


def _counting_epochs(plan: Plan) -> str:
    """Return the key for which an epoch must have whole steps: first the one that has no other way out."""
    if plan.caches_prefix:
        return "model.prefix_cache"
    every_epoch = plan.evaluation is not None and plan.evaluation.every == "epoch"
    return "evaluation.every" if every_epoch else "lr_scheduler.every"


def _loader_for(job: Job, worker: int | None) -> Callable[[Plan], Source]:
    """Return the function that opens the data that `worker` needs; inputs and targets for None or a script."""
    placement = job.schedule.placement
    if job.plan.data.targets is None or worker is None or worker >= len(placement):
        return load_source
    stages = {*map(job.schedule.replicas.stage, placement[worker])}
    if 0 not in stages:
        return load_targets
    return load_source if job.schedule.stages - 1 in stages else load_inputs


def _reads_data(job: Job, worker: int | None) -> bool:
    """Return True if the process reads data. A worker that the plan does not have is refused later."""
    placement = job.schedule.placement
    if job.plan.scripted:
        return False
    if worker is None or worker >= len(placement):
        return True
    ends = {0, job.schedule.stages - 1}
    return not ends.isdisjoint(map(job.schedule.replicas.stage, placement[worker]))
