"""`stageline train`: trains a plan on this machine, in one terminal."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click
import msgspec

from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.signals import Signals, exit_at_once
from stageline.pipeline.process.streams import lost_output
from stageline.pipeline.program import Timed
from stageline.workers.cli import completion, options
from stageline.workers.cli.consent import allow
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.monitoring import scraping, telemetry
from stageline.workers.cli.monitoring.dashboards import dashboard_beside, demand_dashboard
from stageline.workers.cli.monitoring.measured import Monitoring, asked_by, asked_here
from stageline.workers.cli.monitoring.stalls import stall_command
from stageline.workers.cli.monitoring.telemetry import monitoring
from stageline.workers.cli.output import CommandFailed, counted, log_to_stderr, say, summary
from stageline.workers.control.questions import Questions
from stageline.workers.errors import RunFailed
from stageline.workers.extras import drawing as timetable
from stageline.workers.runs.folder import RESULT, folder, lengthens
from stageline.workers.runs.owner import StartingRun

from .plan import chosen_lines, tight_lines

if TYPE_CHECKING:
    from stageline.pipeline.plan import Plan
    from stageline.pipeline.schedule import Schedule
    from stageline.workers.launch.template import Template

WIDE = 160  # columns of a timetable that is not printed on a terminal


@click.command(
    cls=Command,
    examples=("stageline train examples/digits --set schedule.name=gpipe", "stageline train examples/digits --resume"),
    groups={
        "Run": ("--resume", "--spares", "--allow", "--on-stall"),
        "Monitoring": ("--dashboard", "--metrics", "--otel"),
    },
    codes=codes(
        ExitCode.NO_WORKER,
        ExitCode.SAVED,
        ExitCode.REFUSED,
        ok="the run has finished",
        failed="the run failed",
        interrupted="interrupted, and nothing saved",
    ),
)
@options.config
@options.sets
@click.option(
    "--resume",
    metavar="[RUN]",
    is_flag=False,
    flag_value="",
    callback=options.run_id,
    shell_complete=completion.run_ids,
    help="Continue a stopped run, also with another cut, schedule or workers, or any run with more steps. Default: the "
    "plan's newest.",
)
@click.option(
    "--spares", type=click.IntRange(min=0), default=0, help="Number of spare workers, each ready to replace a lost one."
)
@click.option(
    "--on-stall",
    metavar="CMD",
    callback=stall_command,
    help="Command to start, without a shell, when the run stalls or makes half as many steps per second as at its "
    "best. It gets STAGELINE_RUN, STAGELINE_EVENT, STAGELINE_CAUSE and others, and a minute.",
)
@click.option(
    "--dashboard", is_flag=True, help="Print a link to a page that follows the run, as `stageline dashboard`."
)
@scraping.option
@telemetry.option
@options.as_json
@allow
def train(
    config: str,
    sets: tuple[str, ...],
    resume: str | None,
    spares: int,
    on_stall: tuple[str, ...],
    dashboard: bool,
    metrics: tuple[str, int] | None,
    otel: bool,
    as_json: bool,
) -> None:
    """Train the plan CONFIG on this machine.

    The broker and every worker are processes of their own. The first Ctrl-C stops the run, after saving the step if
    recovery is on; the second kills it. Either way no process is left running.
    """
    log_to_stderr()
    from stageline.workers.launch import template
    from stageline.workers.launch.template import libraries_of

    if dashboard:
        demand_dashboard()

    def leave(number: int) -> None:
        processes.abandon()
        exit_at_once(number)

    with monitoring(metrics, otel=otel) as shown, template.Template() as processes, Signals(on_first=leave):
        processes.warm()  # first: reading the plan takes half a second, and the template's imports some seconds
        plan = options.plan_of(config, sets)
        _warn_of_address(plan)
        if spares:
            options.require_restarts(plan)
        processes.preload(libraries_of(plan))
        _train(plan, config, sets, resume, spares, on_stall, dashboard, shown, as_json, processes)


def _warn_of_address(plan: "Plan") -> None:
    """Print a warning if the plan sets `broker.url`, which `train` does not use."""
    if plan.origins.get("broker.url", "default") != "default" and not plan.queues.in_one_process:
        unused = (
            f'broker.url = "{masked(plan.broker.url)}" is not used: `stageline train` starts a broker of its own, at a '
            "free address. For workers that you start yourself, run `stageline broker` and `stageline worker`"
        )
        options.warn([unused])


def _train(
    plan: "Plan",
    config: str,
    sets: tuple[str, ...],
    resume: str | None,
    spares: int,
    on_stall: Sequence[str],
    dashboard: bool,
    shown: Monitoring,
    as_json: bool,
    processes: "Template",
) -> None:
    starting = StartingRun(plan, resume)  # before the seconds that the trial takes
    arguments = options.plan_arguments(config, sets)

    def leave(number: int) -> None:
        starting.abandon()
        processes.abandon()
        exit_at_once(number)

    with starting, Signals(on_first=leave):
        from stageline.workers.cli.monitoring.progress import progress_of
        from stageline.workers.launch.launch import prepare_launch, run_launch

        launch = prepare_launch(plan, arguments, processes, resume, spares, starting.id)
        if launch.run != starting.id:
            how = "with more steps" if lengthens(launch.plan, folder(plan, starting.id)) else "in another layout"
            say(f"stageline: run {starting.id} goes on {how}, as {launch.run}", err=True)
            starting.move_to(launch.run)
    options.warn(launch.warnings[len(plan.warnings) :])
    tight = tight_lines(launch.memory, launch.workers) if launch.memory else ()
    for line in (*chosen_lines(launch.memory), *tight):
        say(f"stageline: {line}", err=True)
    workers = counted(len(launch.plan.workers), "worker")
    say(f"stageline: run {launch.run}: {workers}, logs in {launch.folder}", err=True)
    questions = Questions()
    ask = asked_here(questions) if launch.plan.queues.in_one_process else asked_by(launch.folder)
    beside = dashboard_beside(launch.folder) if dashboard else nullcontext()
    following = progress_of(launch, on_stall)
    with beside, options.user_prints_to_stderr(), shown(launch.folder, ask), following as on_status:
        ended = run_launch(launch, arguments, on_status, processes, questions)
    if left_out := len(list(launch.folder.glob("skipped/stage-*/*"))):
        were = counted(left_out, "microbatch was", "microbatches were")
        say(f"stageline: {were} left out: {launch.folder / 'skipped'} says why", err=True)
    if ended.code == ExitCode.SAVED:
        named = options.plan_arguments(config, options.without_passwords(sets))
        again = shlex.join(("stageline", "train", *named, "--resume", launch.run))
        raise CommandFailed(f"{ended.reason}. Go on with: {again}\nThe logs are in {launch.folder}", ended.code)
    if ended.result is None:
        reason = ended.reason if ended.code == ExitCode.INTERRUPTED else RunFailed.coded(ended.reason)
        raise CommandFailed(f"{reason}\nThe logs are in {launch.folder}", ended.code)
    if as_json:
        click.echo(msgspec.json.encode(ended.result))
    else:
        say(summary(ended.result, launch.folder))
        if ended.timed:
            say(_timetable(launch.plan.schedule.name, launch.schedule, ended.timed))
    sys.stdout.flush()
    if (lost := lost_output()) is not None:
        kept = f"The run has finished; its result is in {launch.folder / RESULT}"
        raise CommandFailed(f"cannot write to stdout: {lost.strerror}. {kept}", ExitCode.FAILED, answered=True)


def _timetable(name: str, schedule: "Schedule", timed: Sequence[Timed]) -> str:
    first, last = min(each.step for each in timed), max(each.step for each in timed)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    drawn = timetable.draw_text(
        timed,
        width=options.width() or WIDE,
        ascii_only=options.ascii_only(),
        seconds=True,
        stage=schedule.label,
    )
    return f"\n{name} as it ran, {steps}:\n{drawn}"
