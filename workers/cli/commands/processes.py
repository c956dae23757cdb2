"""Commands that are one process of a run: `worker`, `broker`, and `trial`, which other commands start to try a plan."""

import faulthandler
import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

import click
import msgspec
from click.core import ParameterSource

from stageline.pipeline.addresses import masked, transport_of
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.lifeline import Lifeline
from stageline.workers.cli import completion, options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import log_to_stderr, say

if TYPE_CHECKING:
    from stageline.pipeline.plan import Plan

ONE_ATTEMPT = 0.5  # seconds for the broker to answer, with --patience 0
PATIENCE, JOIN_PATIENCE = 10.0, 600.0  # seconds to try to reach the broker
ADDRESS = "STAGELINE_BROKER__URL"
GRACE = 5.0  # seconds beyond its bound, in which the process that started it ends it


def _address_if_given(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return options.address(dials=True)(ctx, parameter, value) if value else value


@click.command(
    cls=Command,
    examples=(
        "stageline worker examples/digits --broker tcp://10.0.0.4:5600",
        "stageline worker --join tcp://10.0.0.4:7000 --patience 60",
    ),
    groups={"Run": ("--index", "--name", "--spare"), "Network": ("--broker", "--join", "--patience")},
    codes=codes(ExitCode.NO_BROKER, ExitCode.NO_WORKER, ExitCode.SAVED, ExitCode.REFUSED, ok="the run has finished"),
)
@options.config
@options.sets
@click.option(
    "--broker",
    callback=options.address(dials=True),
    metavar="URL",
    shell_complete=completion.broker_addresses,
    help="The broker's address. Default: broker.url of the plan.",
)
@click.option(
    "--join",
    is_flag=False,
    flag_value="",
    callback=_address_if_given,
    metavar="URL",
    shell_complete=completion.broker_addresses,
    help=f"Join the script whose broker is there; without a URL, at {ADDRESS} of the environment. Takes no CONFIG.",
)
@click.option("--index", type=click.IntRange(min=0), help="Index of the worker in the plan. Default: any free one.")
@click.option("--name", help="Name of this worker in reports.")
@click.option(
    "--patience",
    type=options.Finite(min=0),
    help=f"Seconds to try to reach the broker; 0 tries once. Default: {PATIENCE:g}, with --join {JOIN_PATIENCE:g}.",
)
@click.option("--spare", is_flag=True, help="Load everything and wait; take the place of the next worker that is lost.")
@click.option("--standing-in", is_flag=True, hidden=True, help="A worker of another place has started it.")
@options.lifeline
@click.option("--sockets", hidden=True, help="Folder for its sockets.")
@click.pass_context
def worker(
    ctx: click.Context,
    config: str,
    sets: tuple[str, ...],
    broker: str | None,
    join: str | None,
    index: int | None,
    name: str | None,
    patience: float | None,
    spare: bool,
    standing_in: bool,
    lifeline: int,
    sockets: str | None,
) -> int:
    """Run one worker of the plan CONFIG.

    It computes its stages until the run is over. The other workers may be on any machine. With --join, the plan is that
    of a script, and its functions are imported from the current folder, which must have the script's files.
    """
    log_to_stderr()
    if patience is None:
        patience = PATIENCE if join is None else JOIN_PATIENCE
    patience = patience or ONE_ATTEMPT

    command = () if join is not None else ("worker", *options.plan_arguments(config, sets))
    if command and broker:
        command = (*command, "--broker", broker)

    def work(plan: "Plan") -> int:
        from stageline.workers.process.worker import WorkerOptions
        from stageline.workers.process.worker_process import run_worker

        if spare:
            options.require_restarts(plan)
        if join is None and lifeline == -1:
            say(f"stageline: {_dials(broker or plan.broker.url, patience)}", err=True)
        return run_worker(
            plan,
            WorkerOptions(
                broker or plan.broker.url,
                name or ("worker" if index is None else f"worker-{index}"),
                index,
                patience,
                lifeline=lifeline,
                sockets=sockets,
                spare=spare,
                joined=join is not None,
                command=command if lifeline == -1 or standing_in else (),  # `train` replaces its own workers
                standing_in=standing_in,
            ),
        )

    if join is None:
        return work(options.plan_of(config, sets))
    return _work_for_script(ctx, join, patience, sets, work)


def _dials(url: str, patience: float) -> str:
    """Return which broker a worker will ask for its place, and for how long, as a sentence."""
    which = " (of a range of ports, the first is dialled)" if transport_of(url).has_free_port(url) else ""
    where = f"{masked(url)}{which}"
    return f"loads model and data, then asks the broker at {where} for a place, for {patience:g} s at most"


def _work_for_script(
    ctx: click.Context, address: str, patience: float, sets: tuple[str, ...], work: Callable[["Plan"], int]
) -> int:
    """Do `work` with the plan of the script at `address`, or at the address in the environment."""
    for name, option in (("config", "CONFIG"), ("broker", "--broker")):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--join goes without {option}: the plan is the script's. Leave one of both out")
    address = address or os.environ.get(ADDRESS, "")
    if not address:
        raise click.UsageError(f"--join needs the address of the script's broker, or {ADDRESS} in the environment")
    from stageline.workers.process.join import work_for_script
    from stageline.workers.process.worker_process import warm_up_device

    def warn_and_work(plan: "Plan") -> int:
        options.warn(plan.warnings)
        return work(plan)

    warm_up_device("cpu")  # takes seconds, which others wait for once this worker has its place
    return work_for_script(address, patience, sets, warn_and_work)


@click.command(
    cls=Command,
    examples=(
        "stageline broker examples/digits --bind tcp://10.0.0.4:5600",
        "stageline broker examples/digits --run digits-20260131-101500-1f0c --resume",
    ),
    groups={"Run": ("--run", "--resume"), "Network": ("--bind",)},
    codes=codes(
        ExitCode.NO_WORKER,
        ExitCode.SAVED,
        ExitCode.REFUSED,
        ok="the run has finished",
        interrupted="interrupted before the run has ended",
    ),
)
@options.config
@options.sets
@click.option(
    "--bind",
    callback=options.address(dials=False),
    metavar="URL",
    shell_complete=completion.broker_addresses,
    help="Address to listen at. Default: broker.url of the plan.",
)
@click.option(
    "--run",
    metavar="ID",
    callback=options.run_id,
    shell_complete=completion.run_ids,
    help="Continue the run with this id. Default: a new run.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run even if it was stopped. Workers that are still training keep their places.",
)
@click.option("--new", is_flag=True, hidden=True, help="No broker has served the run before.")
@click.option(
    "--length",
    hidden=True,
    help="How long the run is, as a RunLength in JSON.",
)
@options.lifeline
def broker(
    config: str,
    sets: tuple[str, ...],
    bind: str | None,
    run: str | None,
    resume: bool,
    new: bool,
    length: str | None,
    lifeline: int,
) -> int:
    """Run the broker of the plan CONFIG until the run is over."""
    log_to_stderr()
    plan = options.plan_of(config, sets)
    from stageline.broker.control.records import RunLength
    from stageline.workers.process.broker_process import BrokerOptions, run_broker
    from stageline.workers.runs import folder as runs

    def announce(endpoint: str, line: str) -> None:
        records = runs.folder(plan, place.run) if plan.broker.store == runs.IN_FOLDER else masked(plan.broker.store)
        say(f"run {place.run}: broker at {masked(endpoint)}, records in {records}", err=True)
        if not place.lifeline.supervised:
            shown = options.without_passwords(sets)
            named = () if endpoint == plan.broker.url else ("--broker", masked(endpoint))
            named = ("--join", line) if line else named
            command = ("stageline", "worker", *options.plan_arguments(config, shown), *named)
            say(f"start every worker with: {shlex.join(command)}", err=True)
            if len(shown) < len(sets):
                say("and put the addresses that contain a password into its environment", err=True)

    place = BrokerOptions(
        bind or plan.broker.url,
        run or runs.new_id(plan),
        Lifeline(lifeline),
        resume,
        new or not run,
        msgspec.json.decode(length, type=RunLength) if length else None,
    )
    return run_broker(plan, place, announce)


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
    from stageline.pipeline.model.own_schedule import read_plan
    from stageline.workers.extras.preflight.trial import TrialWriter, carry_out_trial

    with options.user_prints_to_stderr():
        plan = read_plan(config, sets=sets, environment=os.environ)
        carry_out_trial(plan, TrialWriter(mark), layouts=layouts, costs=costs)
    faulthandler.cancel_dump_traceback_later()
    return ExitCode.OK
