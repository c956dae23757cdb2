"""Commands that are one process of a run: `worker`, `broker`, and `trial`, which other commands start to try a plan."""

import faulthandler
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import msgspec
from click.core import ParameterSource

from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.addresses import is_showable, masked, parted, transport_of
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process import last_line
from stageline.pipeline.process.kept import KeeperLink
from stageline.pipeline.process.lifeline import Lifeline
from stageline.workers.cli import broker_address, completion, options
from stageline.workers.cli.consent import allow
from stageline.workers.cli.help import ARGUMENTS, Command, codes
from stageline.workers.cli.monitoring import scraping, telemetry
from stageline.workers.cli.monitoring.measured import asked_here
from stageline.workers.cli.output import log_to_stderr, say
from stageline.workers.control.enrolling import JOIN, address_of, demand_key, entered, is_join_line
from stageline.workers.control.refusals import shown
from stageline.workers.keys.party_keys import placed

if TYPE_CHECKING:
    from stageline.pipeline.plan import Plan

ONE_ATTEMPT = 0.5  # seconds for the broker to answer, with --patience 0
PATIENCE, JOIN_PATIENCE = 10.0, 600.0  # seconds to try to reach the broker
ADDRESS = "STAGELINE_BROKER__URL"
GRACE = 5.0  # seconds beyond its bound, in which the process that started it ends it


@click.command(
    cls=Command,
    examples=(
        "stageline worker examples/digits --join 'tcp://desk:7000#k1....'",
        "stageline worker --join @line.txt --patience 60",
    ),
    groups={
        "Run": ("--index", "--name", "--spare", "--allow"),
        "Network": ("--broker", "--join", "--patience"),
        "End": ("--notice-seconds", "--keep", "--hung-seconds", "--alive-file"),
    },
    codes=codes(
        ExitCode.NO_BROKER,
        ExitCode.NO_WORKER,
        ExitCode.SAVED,
        ExitCode.LEFT,
        ExitCode.NOT_ADMITTED,
        ExitCode.REFUSED,
        ok="the run has finished",
    ),
)
@options.config
@options.sets
@click.option(
    "--broker",
    callback=broker_address.address(dials=True),
    metavar="URL",
    shell_complete=completion.broker_addresses,
    help="The broker's address. Default: broker.url of the plan.",
)
@click.option(
    "--join",
    is_flag=False,
    flag_value="",
    callback=broker_address.address(dials=True),
    metavar="LINE",
    shell_complete=completion.broker_addresses,
    help="Join by the line that a broker printed: LINE, @FILE, - (standard input), or nothing and the line in "
    f"{JOIN}. Without CONFIG, the plan is that of the script there.",
)
@click.option("--index", type=click.IntRange(min=0), help="Index of the worker in the plan. Default: any free one.")
@click.option("--name", help="Name of this worker in reports.")
@click.option(
    "--patience",
    type=options.Finite(min=0),
    help=f"Seconds to try to reach the broker; 0 tries once. Default: {PATIENCE:g}, with --join {JOIN_PATIENCE:g}.",
)
@click.option("--spare", is_flag=True, help="Load everything and wait; take the place of the next worker that is lost.")
@click.option(
    "--notice-seconds",
    type=options.Finite(min=0, min_open=True),
    help="At SIGTERM, leave within so many seconds: finish the step, save it, free the place, exit with code 76.",
)
@click.option("--keep", is_flag=True, help="Start the worker again when it ends or hangs, unless its end is final.")
@click.option(
    "--hung-seconds",
    type=options.Finite(min=5),  # the end of an interpreter with torch takes seconds, without a sign
    default=60.0,
    show_default=True,
    help="With --keep: a worker that gives no sign of life for so long is killed.",
)
@click.option(
    "--alive-file",
    callback=lambda ctx, option, path: None if path is None else _alive_file(path),
    metavar="PATH",
    help="Touch this file every second, as long as the worker progresses.",
)
@click.option("--kept", type=int, default=-1, hidden=True, help="Descriptor of the link to a keeper.")
@click.option("--standing-in", is_flag=True, hidden=True, help="A worker of another place has started it.")
@options.lifeline
@click.option("--sockets", hidden=True, help="Folder for its sockets.")
@allow
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
    notice_seconds: float | None,
    keep: bool,
    hung_seconds: float,
    alive_file: str | None,
    kept: int,
    standing_in: bool,
    lifeline: int,
    sockets: str | None,
) -> int:
    """Run one worker of the plan CONFIG.

    It computes its stages until the run is over. The other workers may be on any machine. With --join and no CONFIG,
    the plan is that of a script, and its functions are imported from the current folder, which must have the script's
    files.
    """
    if kept == -1 and not keep and ctx.get_parameter_source("hung_seconds") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--hung-seconds has no effect without --keep: add --keep, or leave it out")
    if keep:
        _become_keeper(ctx.meta[ARGUMENTS], hung_seconds, alive_file or "")
    keeper = KeeperLink(kept)
    if kept != -1:  # a status of the user's code is no exit code of a worker
        ctx.with_resource(last_line.exit_is_failure())
    log_to_stderr(to_file=lifeline != -1 and not standing_in)
    if join is not None and broker is not None:
        raise click.UsageError("--join goes without --broker: both name the broker. Leave one of them out")
    given = broker_address.given(join or broker)
    if join == "" and not given:
        given = os.environ.get(ADDRESS, "")
        if not given:
            raise click.UsageError(f"--join needs the line that was printed, or that line in {JOIN} of the environment")
    if patience is None:
        patience = PATIENCE if join is None else JOIN_PATIENCE
    patience = patience or ONE_ATTEMPT
    called = name or ("worker" if index is None else f"worker-{index}")
    scripted = join is not None and ctx.get_parameter_source("config") is not ParameterSource.COMMANDLINE
    quiet = lifeline != -1

    def work(plan: "Plan", url: str, pair: KeyPair | None) -> int:
        place, alone = index, quiet and not parted(url)[1]  # `train` has all workers here
        if plan.parties is not None and not alone:
            place, pair = placed(plan, url, index, os.environ)
        from stageline.workers.process.worker import WorkerOptions
        from stageline.workers.process.worker_process import run_worker

        if spare:
            options.require_restarts(plan)
        if notice_seconds is not None:
            options.require_restarts(plan, "with --notice-seconds a worker leaves its place to another")
        if not (scripted or quiet):
            say(f"stageline: {_dials(url, patience)}", err=True)
        starts = not scripted and (standing_in or not quiet)  # `train` replaces its own workers
        return run_worker(
            plan,
            WorkerOptions(
                url,
                called,
                place,
                patience,
                pair=pair,
                lifeline=lifeline,
                sockets=sockets,
                spare=spare,
                joined=scripted,
                command=("worker", *options.plan_arguments(config, sets)) if starts else (),
                standing_in=standing_in,
                notice=notice_seconds,
                alive=Path(alive_file).absolute() if alive_file else None,
                over=keeper.say_over,
            ),
        )

    if scripted:
        return _work_for_script(given, called, patience, sets, work)
    plan = options.plan_of(config, sets, address_of(given))
    if plan.parties is not None:  # their keys are not enrolled
        demand_key(text := given or plan.broker.url, insecure=False)
        return work(plan, address_of(text), None)
    return work(plan, *_entered(given or plan.broker.url, called, patience, insecure=plan.broker.insecure))


def _alive_file(path: str) -> str:
    """Return `path` once the file is there. Its time stays: no sign of life is given yet."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except OSError as error:
        raise click.BadParameter(
            f"{path} is not writable ({error.strerror}): name one that this user may write, in a folder that exists"
        ) from error
    return path


def _become_keeper(words: Sequence[str], hung: float, alive: str) -> NoReturn:
    """Replace this process by a keeper of the worker, which takes less memory. `words`: arguments of `worker`."""
    if "-" in words or "--join=-" in words:
        raise click.UsageError(
            "--keep starts the worker more than once: give the join line as @FILE, or in STAGELINE_JOIN"
        )
    rest = list(words)
    rest.remove("--keep")
    command = [sys.executable, "-P", "-m", "stageline.workers.launch.keeper", str(hung), alive, *rest]
    os.execv(sys.executable, command)  # noqa: S606  # our own module


def _entered(text: str, name: str, patience: float, *, insecure: bool) -> tuple[str, KeyPair | None]:
    """Return the address that `text` names, and the pair to dial it with; enrol first if it is a join line."""
    demand_key(text, insecure=insecure)
    if is_join_line(text):
        say(f"stageline: joins the broker at {shown(text)}, for {patience:g} s at most", err=True)
    return entered(text, os.environ, name, patience)


def _dials(url: str, patience: float) -> str:
    """Return which broker a worker will ask for its place, and for how long, as a sentence."""
    which = " (of a range of ports, the first is dialled)" if transport_of(url).has_free_port(url) else ""
    where = f"{masked(url)}{which}"
    return f"loads model and data, then asks the broker at {where} for a place, for {patience:g} s at most"


def _work_for_script(
    given: str, name: str, patience: float, sets: tuple[str, ...], work: Callable[["Plan", str, KeyPair | None], int]
) -> int:
    """Do `work` with the plan of the script at the broker that was `given`."""
    from stageline.workers.process.join import is_insecure, work_for_script
    from stageline.workers.process.worker_process import warm_up_device

    url, pair = _entered(given, name, patience, insecure=is_insecure(sets, os.environ))

    def warn_and_work(plan: "Plan") -> int:
        options.warn(plan.warnings)
        return work(plan, url, pair)

    warm_up_device("cpu")  # takes seconds, which others wait for once this worker has its place
    return work_for_script(url, patience, sets, warn_and_work, pair)


@click.command(
    cls=Command,
    examples=(
        "stageline broker examples/digits --bind tcp://10.0.0.4:5600",
        "stageline broker examples/digits --run digits-20260131-101500-1f0c --resume",
    ),
    groups={"Run": ("--run", "--resume", "--allow"), "Network": ("--bind",), "Monitoring": ("--metrics", "--otel")},
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
    callback=broker_address.address(dials=False),
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
@scraping.option
@telemetry.option
@click.option("--new", is_flag=True, hidden=True, help="No broker has served the run before.")
@click.option(
    "--length",
    hidden=True,
    help="How long the run is, as a RunLength in JSON.",
)
@options.lifeline
@allow
def broker(
    config: str,
    sets: tuple[str, ...],
    bind: str | None,
    run: str | None,
    resume: bool,
    metrics: tuple[str, int] | None,
    otel: bool,
    new: bool,
    length: str | None,
    lifeline: int,
) -> int:
    """Run the broker of the plan CONFIG until the run is over."""
    log_to_stderr(to_file=lifeline != -1)
    plan = options.plan_of(config, sets, bind or "")
    from stageline.broker.control.records import RunLength
    from stageline.workers.process.broker_process import BrokerOptions, run_broker
    from stageline.workers.runs import folder as runs

    def announce(endpoint: str, line: str) -> None:
        records = runs.folder(plan, place.run) if plan.broker.store == runs.IN_FOLDER else masked(plan.broker.store)
        say(f"run {place.run}: broker at {masked(endpoint)}, records in {records}", err=True)
        if not place.lifeline.supervised:
            shown = options.without_passwords(sets)
            named = () if endpoint == plan.broker.url and not bind else ("--broker", masked(endpoint))
            if line:
                named = ("--join", line if is_showable(line) else "@FILE")  # by stageline keys invite > FILE
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
        partial(options.plan_of, config, sets, bind or "") if lifeline == -1 else None,
    )
    with (
        telemetry.monitoring(metrics, otel=otel) as shown,
        shown(runs.folder(plan, place.run), asked_here(place.questions)),
    ):
        return run_broker(plan, place, announce)


@click.command(hidden=True)
@options.config
@options.sets
@click.option("--mark", required=True, help="The text with which its own lines in the log begin.")
@click.option("--bound", type=float, required=True, help="Seconds after which it ends itself.")
@click.option("--layouts", is_flag=True, help="Also tell what each stage has.")
@click.option("--costs", is_flag=True, help="Tell what each layer costs instead.")
@options.lifeline
@allow
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
