"""`stageline train`: a whole run on this machine, in one terminal."""

from typing import TYPE_CHECKING

import click
import msgspec

from stageline.pipeline import timetable
from stageline.workers.cli import option_types as kinds
from stageline.workers.cli import options
from stageline.workers.cli.display.summary import summary
from stageline.workers.cli.display.tables import counted
from stageline.workers.cli.errors import CommandFailed
from stageline.workers.cli.logs import log_to_stderr

if TYPE_CHECKING:  # loads torch
    from stageline.workers.launch.launch import Ended, Launch

WIDE = 160  # columns of a timetable that does not go to a terminal


@click.command(epilog="Example: stageline train examples/digits --set schedule.name=gpipe")
@options.config
@options.sets
@click.option(
    "--resume",
    metavar="[RUN]",
    is_flag=False,
    flag_value="",
    callback=kinds.run_id,
    help="Go on with a stopped run; the newest if not named.",
)
@click.option(
    "--spares", type=click.IntRange(min=0), default=0, help="So many workers wait to take a lost one's place at once."
)
@options.as_json
def train(config: str, sets: tuple[str, ...], resume: str | None, spares: int, as_json: bool) -> None:
    """Train the plan CONFIG here: a broker and every worker, each in a process of its own.

    The first Ctrl-C stops the run, after saving the step if recovery is on; the second ends it at once. Either way
    nothing is left running.
    """
    log_to_stderr()
    plan = options.plan_of(config, sets)
    if spares:
        options.demand_restarts(plan)
    from stageline.workers.cli.display.progress import display
    from stageline.workers.launch.launch import go, ready

    with options.user_prints_to_stderr():
        launch = ready(plan, resume, spares)
    for warning in launch.warnings[len(plan.warnings) :]:
        click.echo(f"stageline: warning: {warning}", err=True)
    workers = counted(len(launch.plan.workers), "worker")
    click.echo(f"stageline: run {launch.run}: {workers}, logs in {launch.folder}", err=True)
    with options.user_prints_to_stderr(), display(launch) as show:
        ended = go(launch, options.plan_words(config, sets), show)
    if (left_out := len(list(launch.folder.glob("skipped/stage-*/*")))) > 0:
        were = "was" if left_out == 1 else "were"
        bad = f"{counted(left_out, 'microbatch', 'microbatches')} {were} left out: {launch.folder / 'skipped'} says why"
        click.echo(f"stageline: {bad}", err=True)
    if ended.result is None:
        raise CommandFailed(f"{ended.reason}\nThe logs are in {launch.folder}", ended.code)
    if as_json:
        click.echo(msgspec.json.encode(ended.result))
    else:
        click.echo("\n".join([summary(ended.result, launch.folder), *_timetable(launch, ended)]))


def _timetable(launch: "Launch", ended: "Ended") -> list[str]:
    if not ended.timed:
        return []
    first, last = min(each.step for each in ended.timed), max(each.step for each in ended.timed)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    drawn = timetable.draw_text(
        ended.timed, width=options.width() or WIDE, ascii_only=not options.writes_unicode(), seconds=True
    )
    return ["", f"{launch.schedule.name} as it ran, {steps}:", drawn]
