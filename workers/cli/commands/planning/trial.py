"""`stageline trial`, which other commands start: tries a plan in this process."""

import faulthandler
import os

import click

from stageline.pipeline import plan as plans
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.lifeline import Lifeline
from stageline.workers.cli import options

GRACE = 5.0  # seconds beyond its bound, in which the process that started it ends it


@click.command(hidden=True)
@options.config
@options.sets
@click.option("--mark", required=True, help="The text with which its own lines in the log begin.")
@click.option("--bound", type=float, required=True, help="Seconds after which it ends itself.")
@click.option("--layouts", is_flag=True, help="Also tell what each stage has.")
@click.option("--costs", is_flag=True, help="Tell what each layer costs instead.")
@options.lifeline
def trial(
    config: str, sets: tuple[str, ...], mark: str, bound: float, layouts: bool, costs: bool, lifeline: int
) -> int:
    """Try the plan CONFIG: load the model and the data, train one microbatch, and write the result to the log."""
    faulthandler.dump_traceback_later(bound + GRACE, exit=True)  # even if user code holds the interpreter's lock
    Lifeline(lifeline).end_process_when_cut(after=0.0)
    from stageline.workers.extras.preflight.trial import TrialWriter, carry_out_trial

    with options.user_prints_to_stderr():
        plan = plans.read_plan(config, sets=sets, environment=os.environ)
        carry_out_trial(plan, TrialWriter(mark), layouts=layouts, costs=costs)
    faulthandler.cancel_dump_traceback_later()
    return ExitCode.OK
