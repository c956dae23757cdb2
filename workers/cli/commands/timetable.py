"""`stageline timetable`: steps as they were planned over the same steps as they ran, and what workers waited for."""

from functools import partial
from pathlib import Path

import click

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.options import answer_about
from stageline.workers.cli.output import CommandFailed, answer, say
from stageline.workers.extras.drawn_steps import WIDTH, DrawnStep, draw_svg, draw_text
from stageline.workers.runs.folder import Facts


@click.command(
    cls=Command,
    examples=(
        "stageline timetable runs/digits-20260131-101500-1f0c",
        "stageline timetable --steps 118..120 --broker tcp://10.0.0.4:5600",
    ),
    groups={"Steps": ("--step", "--steps"), "Output": ("--svg",)},
    codes=codes(ExitCode.NO_BROKER, ExitCode.REFUSED, usage="an option is wrong, or there is no such step"),
)
@options.where
@broker_address.broker
@click.option("--step", type=click.IntRange(min=0), help="The step to draw. Default: the newest finished one.")
@click.option(
    "--steps",
    metavar="A..B",
    callback=options.step_range,
    help="The first and the last step to draw: at most 64 steps, and 12,000 actions if these are more than two steps.",
)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Also write an image to this file.")
@options.as_json
def timetable(
    where: str | None, broker: str | None, step: int | None, steps: range | None, svg: Path | None, as_json: bool
) -> None:
    """Draw steps as planned and as they ran, with all waits.

    The plan is the step's schedule with the measured times of actions. WHERE is a run's folder, or a plan, whose newest
    run is meant. Default: the newest run in ./runs. An image has the last of the steps.
    """
    if step is not None and steps is not None:
        raise click.UsageError("--step and --steps both say which steps are drawn: leave one of them out")
    wanted = {} if steps is None else {"first": str(steps.start), "last": str(steps.stop - 1)}
    facts = answer_about(where, broker, "timetable", **({"step": str(step)} if step is not None else wanted))
    if not facts["steps"]:
        raise CommandFailed(
            f"no times are known of {'these steps' if wanted or step is not None else 'any step'} of run "
            f"{facts['run']}: they are kept of steps that all stages have finished",
            ExitCode.USAGE,
        )
    if svg is not None:
        svg.write_text(draw_svg(DrawnStep.of(facts["steps"][-1])), encoding="utf-8")
    answer(facts, as_json, partial(_print, facts))


def _print(facts: Facts) -> None:
    width = options.width() or WIDTH
    drawn = (draw_text(DrawnStep.of(each), width=width, ascii_only=options.ascii_only()) for each in facts["steps"])
    say(f"run {facts['run']}\n" + "\n\n".join(drawn))
