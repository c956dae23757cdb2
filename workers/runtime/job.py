"""What every process of a run derives from its plan: the model's segments, the schedule, the program, the batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.data import Feed
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import Segment, build_segments, first_trainable, make_stage
from stageline.pipeline.model.load import base_folder, load_function, load_source
from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Schedule, make_schedule
from stageline.pipeline.schedule.check import Verdict, check_schedule
from stageline.pipeline.stage.stage import Stage

from .calls import CallFeed
from .executor import Executor, Metric
from .program import AHEAD, ENDLESS, Program
from .skipping import SkipLog, SkippingExecutor


@dataclass(frozen=True, slots=True)
class Job:
    """A plan that has met its model and data. `plan` has its number of stages and its workers filled in.

    In a scripted run `steps` is ENDLESS, and there is no `own_feed`: batches come with the script's calls.
    """

    plan: Plan
    segments: Sequence[Segment]
    schedule: Schedule
    verdict: Verdict
    steps: int
    own_feed: Feed | None

    @property
    def training_steps(self) -> int | None:
        """How many steps are trained; None if only the script knows."""
        return None if self.plan.scripted else self.steps

    @property
    def feed(self) -> Feed:
        """The plan's batches. Raises `ModelRefused` in a scripted run."""
        if self.own_feed is None:
            raise ModelRefused("the batches of this run come from a script, call by call: there are none beforehand")
        return self.own_feed

    def executor(self, stages: Iterable[int], decisions: SkipLog | None = None) -> Executor:
        """The stages, each on the device that the plan has for it, with data and metrics. With `decisions`, bad
        microbatches are left out if the plan says so. Raises `ModelRefused` for a wrong optimizer or loss."""
        device = {stage: worker.device for worker in self.plan.workers for stage in worker.stages}
        made = {stage: self._stage(stage, device[stage]) for stage in stages}
        feed = self.own_feed or CallFeed(self.schedule.microbatches)
        parts = made, feed, self.program.last, self.metrics, self.plan.scripted
        if decisions is None or self.plan.recovery.on_bad_microbatch == "halt":
            return Executor(*parts)
        return SkippingExecutor(*parts, decisions=decisions)

    @property
    def program(self) -> Program:
        return Program(self.schedule, self.steps, self.evaluation, scripted=self.plan.scripted)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        names = self.plan.model.metrics
        short = [name.replace(":", ".").rpartition(".")[2] for name in names]
        titles = [name if short.count(title) > 1 else title for name, title in zip(names, short, strict=True)]
        folder = base_folder(self.plan)
        metrics = (load_function(name, folder, "model.metrics") for name in names)
        return dict(zip(titles, metrics, strict=True))

    @property
    def evaluation(self) -> range:
        """The steps that evaluate, after the training steps; none without metrics. A script calls for evaluation."""
        return self.own_feed.evaluation if self.own_feed is not None and self.plan.model.metrics else range(0)

    def windows(self) -> dict[QueueKey, int]:
        """How many messages each queue's consumer lets its producer send ahead: about twice the most that the schedule
        can have on its way, so that credit is granted again before it runs out, and not less than a step's beyond it,
        so that it is not granted all the time. It is the schedule that bounds what waits, except after a recovery."""
        return {key: self._window(key) for key in self.program.queues}

    def _window(self, key: QueueKey) -> int:
        microbatches = self.schedule.microbatches
        match key.flow:
            case Flow.CALL | Flow.REPLY:
                return AHEAD
            case Flow.EVALUATION:  # nothing bounds how far a stage is ahead but the calls
                return 2 * microbatches + 2
            case _:
                most = self.verdict.queue_bound[str(key)]
                return max(2 * most + 2, most + microbatches)

    def _stage(self, stage: int, device: str) -> Stage:
        last = stage == self.program.last
        stash_weights = self.schedule.mode == "async" and self.verdict.stage_peak[stage] > 1
        return make_stage(self.plan, self.segments[stage], last=last, device=device, stash_weights=stash_weights)


def prepare(plan: Plan, doing: Callable[[str], None] = lambda what: None) -> Job:
    """Loads the plan's model and data, in a scripted run the model; `doing` is told which is next.

    Raises `PlanRefused` or `ModelRefused` if they cannot be trained as planned.
    """
    doing(f'model.factory = "{plan.model.factory}"')
    segments = build_segments(plan)
    plan = plan.resolved(len(segments))
    choice = plan.schedule
    schedule = make_schedule(
        choice.name,
        plan.placement,
        choice.microbatches,
        mode=choice.mode,
        window=choice.window,
        first_trainable=first_trainable(segments),
    )
    verdict = check_schedule(schedule)
    if plan.scripted:
        return Job(plan, segments, schedule, verdict, ENDLESS, None)
    doing(f'data.source = "{plan.data.source}"')
    source = load_source(plan)
    steps = plan.run.steps if plan.run.steps is not None else (plan.run.epochs or 0) * source.steps_per_epoch
    feed = Feed(source, choice.microbatches, steps, plan.data.batch_size, keep=len(segments) + 2)
    return Job(plan, segments, schedule, verdict, steps, feed)
