"""`stageline schedule`: lists the schedules, and draws one for a shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan.tables import LONGEST_SCHEDULE, FileUnreadable, read_text
from stageline.pipeline.program import Costs, Verdict, check_schedule
from stageline.pipeline.schedule import (
    LISTED,
    Mode,
    Placement,
    Schedule,
    ScheduleRefused,
    Times,
    make_schedule,
    rows_of,
    told_by,
    v_shaped,
    window_for,
)
from stageline.workers.cli import options
from stageline.workers.cli.help import CommandGroup, codes
from stageline.workers.cli.output import answer, counted, share, show, suggestion
from stageline.workers.extras import drawing as timetable

MAX_FORWARDS = 20_000  # drawing and measuring more takes minutes

ABOUT = {
    "gpipe": "all forwards, then all backwards: the simplest; holds the activations of every microbatch of a step",
    "1f1b": "one forward, one backward in turn: as fast as gpipe; stage k holds at most S - k microbatches",
    "eager-1f1b": "1f1b with twice the warm-up: hides the latency of messages, for twice the memory",
    "window": "1f1b with the number of microbatches in flight given for each stage",
    "interleaved-1f1b": "several stages on each worker, in turn: less idle time, more messages",
    "looped-bfs": "all microbatches through one stage of a worker, then through its next: each is in use in one piece",
    "zb-h1": "1f1b with backwards in two halves, the second deferred: about a third of the bubble, S in flight on each",
    "zb-v": "two stages on each worker, down and up again, backwards in two halves: hardly any bubble, 1f1b's memory",
    "dualpipe-v": "the same placement, with forwards and backwards in pairs; from two microbatches a worker on",
    "2bw": "for --mode async: 1f1b without a flush, with an update for each step and two versions of the weights",
}


_positive = options.Finite(min=0, min_open=True)


def from_file(file: Path, mode: Mode, first_trainable: int) -> Schedule:
    """Return the schedule that `file` lists.

    Raises `click.UsageError` for a file that cannot be read, and `ScheduleRefused`, which names it, for a faulty one.

    Args:
        file: File with the schedule.
        mode: Mode of its steps.
        first_trainable: First stage that is trained.
    """
    try:
        rows = rows_of(read_text(file, LONGEST_SCHEDULE))
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    except FileUnreadable as error:
        raise click.UsageError(f"{file}: {error}") from error
    try:
        placement, microbatches = told_by(rows)
        return make_schedule(LISTED, placement, microbatches, mode=mode, rows=rows, first_trainable=first_trainable)
    except ScheduleRefused as error:
        raise ScheduleRefused(f"{file}: {error.reason}", error.reason) from error


def _known(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value not in ABOUT and not _is_plan(value):
        raise click.BadParameter(f"there is no schedule {value}; {suggestion(value, ABOUT)}")
    return value


def _is_plan(name: str) -> bool:
    return name.endswith(".toml") and Path(name).is_file()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _three_times(text: str) -> Times:
    forward, inwards, weights = (float(part) for part in text.split(","))
    if not 0 < min(forward, inwards, weights) <= max(forward, inwards, weights) < float("inf"):
        raise ValueError(text)
    return forward, inwards, weights


def _parsed(kind: str, parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    def callback(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not {kind}") from error

    return callback


_placement = _parsed("a placement: write '0,2;1,3'", lambda text: tuple(map(_numbers, text.split(";"))))
_times = _parsed("three times above 0: write 1,1.5,0.5", _three_times)
_window = _parsed("a window: write 4,2", _numbers)


@click.group(cls=CommandGroup)
def schedule() -> None:
    """List and draw schedules: the order of each worker's actions."""


@schedule.command("list", examples=("stageline schedule list", "stageline schedule list --json"))
@options.as_json
def list_(as_json: bool) -> None:
    """List the schedules."""
    rows = [{"name": name, "about": about} for name, about in ABOUT.items()]
    facts = {"schema": "schedules/1", "schedules": rows}
    answer(facts, as_json, lambda: show("schedules", ("name", "description"), [*ABOUT.items()]))


@schedule.command(
    "show",
    examples=(
        "stageline schedule show 1f1b --stages 4 --microbatches 8",
        "stageline schedule show zb-h1 --stages 4 --microbatches 8 --latency 0.5 --svg zb-h1.svg",
    ),
    groups={
        "Schedule": ("--file", "--microbatches", "--window", "--first-trainable", "--mode"),
        "Placement": ("--stages", "--workers", "--placement"),
        "Durations": ("--forward", "--backward", "--times", "--latency"),
        "Output": ("--svg",),
    },
    codes=codes(ExitCode.REFUSED),
)
@click.argument(
    "name",
    required=False,
    callback=_known,
    shell_complete=lambda ctx, parameter, begun: [name for name in ABOUT if name.startswith(begun)],
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead of NAME: a CSV file with a row of actions for each worker, as torch writes them.",
)
@click.option("--stages", type=click.IntRange(min=1), help="Number of stages; required without --placement.")
@click.option("--workers", type=click.IntRange(min=1), help="Number of workers. Default: one for each stage.")
@click.option("--placement", metavar="'0,2;1,3'", callback=_placement, help="The stages of each worker.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Number of microbatches in a batch.")
@click.option(
    "--window",
    metavar="K,K,...",
    callback=_window,
    help="For the schedules window and zb-h1: microbatches in flight, by stage.",
)
@click.option(
    "--first-trainable",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The first stage that trains; those below it run forward only.",
)
@click.option(
    "--mode",
    type=click.Choice(["sync", "async"]),
    default="sync",
    show_default=True,
    help="Training mode of the schedule.",
)
@click.option("--forward", type=_positive, default=1.0, show_default=True, help="Duration of a forward.")
@click.option("--backward", type=_positive, default=2.0, show_default=True, help="Duration of a backward.")
@click.option("--times", metavar="F,I,W", callback=_times, help="For zb-v: how long F, I and W of a stage take.")
@click.option("--latency", type=options.Finite(min=0), default=0.0, show_default=True, help="Latency of a message.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Also write the drawing to this file.")
@options.as_json
def show_(
    name: str | None,
    file: Path | None,
    stages: int | None,
    workers: int | None,
    placement: Placement | None,
    microbatches: int | None,
    window: tuple[int, ...] | None,
    first_trainable: int,
    mode: Mode,
    forward: float,
    backward: float,
    times: Times | None,
    latency: float,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Draw a schedule, and print its bubble and what stages hold.

    NAME is a schedule, drawn for a shape, or a plan, such as mine.toml. With --file, the schedule is in that file.
    """
    shape = {
        "--stages": stages,
        "--workers": workers,
        "--placement": placement,
        "--microbatches": microbatches,
        "--window": window,
        "--times": times,
    }
    try:
        if file is not None:
            _demand_alone("--file", {"NAME": name, **shape})
            found = from_file(file, mode, first_trainable)
        elif name is not None and _is_plan(name):
            _demand_alone(name, shape)
            found = options.plan_of(name, ()).make_schedule(first_trainable=first_trainable)
        else:
            if name is None:
                raise click.UsageError("give the NAME of a schedule, or a --file")
            if microbatches is None:
                raise click.UsageError("give the number of --microbatches")
            placed = _placed(name, stages, workers, placement, microbatches)
            found = make_schedule(
                name, placed, microbatches, mode=mode, window=window, times=times, first_trainable=first_trainable
            )
    except ScheduleRefused as error:  # not a plan is wrong, but the flags
        raise click.UsageError(str(error)) from error
    costs = Costs.even(found.stages, forward=forward, backward=backward, latency=latency)
    if times is not None:
        takes = [(each,) * found.stages for each in times]
        costs = replace(costs, forward=takes[0], input=takes[1], weight=takes[2])
    verdict = check_schedule(found, costs)
    if svg is not None:
        svg.write_text(timetable.draw_svg(verdict.timed, title=_title(found)), encoding="utf-8")
    hiding = window_for(costs.latency, forward, backward) if latency else ()
    answer(_facts(found, verdict), as_json, lambda: _print(found, verdict, hiding))


def _demand_alone(file: str, given: Mapping[str, object]) -> None:
    """Raise `click.UsageError` for options that repeat what `file` says itself."""
    if names := [name for name, value in given.items() if value is not None]:
        raise click.UsageError(f"{file} says {', '.join(names)} itself: leave one of the two out")


def _placed(
    name: str, stages: int | None, workers: int | None, placement: Placement | None, microbatches: int
) -> Placement:
    count = stages if placement is None else sum(map(len, placement))
    if count is None:
        raise click.UsageError("give the number of --stages, or a --placement")
    if count * microbatches > MAX_FORWARDS:
        raise click.UsageError(
            f"{count} stages of {microbatches} microbatches are too many to draw; at most {MAX_FORWARDS} together"
        )
    if placement is None:
        if workers is not None and workers > count:
            raise click.UsageError(f"--workers {workers} are more than there are stages: {count}")
        usual = count // 2 if name in ("zb-v", "dualpipe-v") and count % 2 == 0 else count
        return _spread(name, count, workers or usual)
    for flag, given, placed in (("--stages", stages, count), ("--workers", workers, len(placement))):
        if given not in (None, placed):
            raise click.UsageError(
                f"{flag} {given} contradicts the --placement, which has {placed}; leave one of them out"
            )
    return placement


def _spread(name: str, stages: int, workers: int) -> Placement:
    """Return the placement of `stages` over `workers`.

    Stages that loop over workers go in turn, a V down and up; others are blocks of neighbours.
    """
    if name in ("interleaved-1f1b", "looped-bfs"):
        return tuple(tuple(range(worker, stages, workers)) for worker in range(workers))
    if name in ("zb-v", "dualpipe-v") and stages == 2 * workers:
        return v_shaped(workers)
    edges = [worker * stages // workers for worker in range(workers + 1)]
    return tuple(tuple(range(low, high)) for low, high in pairwise(edges))


def _title(found: Schedule) -> str:
    return (
        f"{found.name}, {counted(found.stages, 'stage')} on {counted(len(found.placement), 'worker')}, "
        f"{counted(found.microbatches, 'microbatch', 'microbatches')}{', asynchronous' * (found.mode == 'async')}"
    )


def _facts(found: Schedule, verdict: Verdict) -> dict[str, object]:
    return {
        "schema": "schedule/1",
        "name": found.name,
        "mode": found.mode,
        "placement": found.placement,
        "microbatches": found.microbatches,
        "actions": [[str(action) for action in actions] for actions in found.workers],
        "span": verdict.span,
        "ideal": verdict.ideal,
        "bubble": verdict.bubble,
        "idle": verdict.idle,
        "stage_peak": verdict.stage_peak,
        "worker_peak": verdict.worker_peak,
        "queue_bound": verdict.queue_bound,
    }


def _print(found: Schedule, verdict: Verdict, hiding: Sequence[int]) -> None:
    click.echo(_title(found))
    click.echo(timetable.draw_text(verdict.timed, width=options.width(), ascii_only=options.ascii_only()))
    bubble = f"bubble {verdict.bubble:g} of {verdict.span:g} ({share(verdict.bubble / verdict.span)})"
    peaks = ", ".join(f"{peak} on stage {stage}" for stage, peak in enumerate(verdict.stage_peak))
    click.echo(f"{bubble}; in flight at most {peaks}")
    if hiding:
        click.echo(f"smallest window that hides this latency: {','.join(map(str, hiding))}")
