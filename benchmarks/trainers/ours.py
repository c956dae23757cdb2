"""stageline as its users run it: a supervisor, a broker and two workers, each a process, and all measured.

The end of each step is read from the broker's records; the retained bytes are those that the workers reported.
"""

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from statistics import median

from benchmarks.measuring import redis_server, relay
from benchmarks.workload import MICROBATCHES, Timing, Workload
from stageline.broker.control.records import ScheduleOrder
from stageline.broker.control.sqlite_store import SqliteStore
from stageline.broker.ledger.orders import OrderBook
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import read_plan
from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import Kind, Schedule
from stageline.workers.launch.launch import LaunchResult, prepare_launch, run_launch
from stageline.workers.launch.template import Template
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.records import measured

PLAN = Path(__file__).parent.parent / "stageline.toml"


class TrainerFailed(Exception):
    """The run that was to be measured did not finish."""


def unfinished(plan: object, sets: Sequence[str], ended: LaunchResult) -> BaseException:
    """Why there is nothing to measure: an interrupt, which ends a run and not this process, or what the run says."""
    if ended.code in (ExitCode.INTERRUPTED, ExitCode.SAVED):
        return KeyboardInterrupt()
    return TrainerFailed(f"{plan}, {', '.join(sets)}: {ended.reason}")


def train(workload: Workload, sets: Sequence[str] = ()) -> Timing:
    """`sets`: settings of the plan beside the workload's, each as `--set` takes it."""
    return train_plan(PLAN, [*settings(workload), *sets])


def train_plan(plan: Path, sets: Sequence[str], shared: Template | None = None) -> Timing:
    """The run of a plan's file with these settings, in a folder that is removed. `shared`: starts its processes, and
    those of other runs."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"run.dir={folder}", *sets]
        arguments = [str(plan), *(argument for each in sets for argument in ("--set", each))]
        peak = _Peak()
        with Template() if shared is None else nullcontext(shared) as template:
            launch = prepare_launch(read_plan(plan, sets=sets, environment=os.environ), arguments, template)
            ended = run_launch(launch, arguments, peak, template)
        if ended.result is None or ended.result.loss is None:
            raise unfinished(plan, sets, ended)
        with closing(SqliteStore(launch.folder / runs.STORE)) as store:
            timed = measured(store, launch.schedule, range(launch.steps))
            orders = OrderBook.stored_in(store.load().facts).orders
        ends, last = step_ends(timed, launch.steps), orders[-1] if orders else None
        name = launch.schedule.name if last is None else _title(last)
        result = ended.result
        return Timing(ends, result.loss, peak.bytes, result.seconds, result.weights_sha256, name, busiest(timed))


def train_over_redis(workload: Workload, *sets: str) -> Timing:
    """Over a server that is started for this run alone."""
    with redis_server.running() as url:
        return train(workload, [f"queues.url={url}", *sets])


def train_keyed(workload: Workload) -> Timing:
    """At addresses that other machines reach, so that connections between workers have keys."""
    return train(workload, ["queues.url=tcp://0.0.0.0:0"])


def train_relayed(workload: Workload) -> Timing:
    """Through a relay that is started for this run alone."""
    with relay.running() as url:
        return train(workload, [f"queues.url={url}"])


class _Peak:
    """The most bytes that all workers together have reported to retain."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, facts: Facts) -> None:
        self.bytes = max(self.bytes, sum(worker.get("retained_bytes", 0) for worker in facts["workers"]))


def settings(workload: Workload) -> list[str]:
    """The keys of the plan that `workload` sets, as `--set` takes them."""
    return [
        f"run.steps={workload.steps}",
        f"model.options={{ width = {workload.width}, layers = {workload.layers} }}",
        f"data.options={{ width = {workload.width}, sequence = {workload.sequence} }}",
        f"data.batch_size={MICROBATCHES * workload.rows}",
    ]


def ends_in(folder: Path, schedule: Schedule, steps: int) -> tuple[float, ...]:
    """When the last stage to do so ended each step of the run in `folder`: stage 0, unless it runs forward only."""
    with closing(SqliteStore(folder / runs.STORE)) as store:
        return step_ends(measured(store, schedule, range(steps)), steps)


def step_ends(timed: Sequence[Timed], steps: int) -> tuple[float, ...]:
    """When the last action of each step ended."""
    last = [0.0] * steps
    for each in timed:
        last[each.step] = max(last[each.step], each.end)
    return tuple(last)


def busiest(timed: Sequence[Timed]) -> float:
    """For how many seconds of a step the busiest worker is at work: the typical time of each kind of action, as often
    as the step has it."""
    durations: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for each in timed:
        durations[each.worker, each.action.kind].append(each.end - each.start)
    steps = 1 + max(each.step for each in timed)
    of_worker: Counter[int] = Counter()
    for (worker, _), found in durations.items():
        of_worker[worker] += median(found) * len(found) / steps
    return max(of_worker.values())


def _title(order: ScheduleOrder) -> str:
    return order.name if order.window is None else f"{order.name} {','.join(map(str, order.window))}"
