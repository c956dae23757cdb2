"""Arguments and options that several commands share, their kinds of value, and the run that they name.

`answer_about` asks about a run: its broker, if one is there, otherwise the run's records.

--broker URL        that broker, and nothing else
a run's folder      the broker whose address is in it, if a process listens there; otherwise its records
a plan              the broker of the newest run in its run.dir, the one at its broker.url, the run's records
nothing             the newest run in ./runs, then the plan of the current folder
"""

import contextlib
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, TextIO, cast

import click
import msgspec

from stageline.broker.control.records import RunId
from stageline.broker.transports.base import backend_of
from stageline.pipeline import plan as plans  # pydantic is imported when a plan is read
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.model.object_names import is_of_script, script_object
from stageline.pipeline.model.own_schedule import read_plan
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.control.enrolling import entered
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.owner import read_owner

from . import completion
from .broker_address import given
from .output import CommandFailed, say

_LAYOUT = ("model.cut=", "model.stages=", "workers.")  # a cut and a number of stages of two commands do not fit


config = click.argument(
    "config", type=click.Path(), default=".", shell_complete=completion.plans
)  # a folder stands for the plan in it
sets = click.option(
    "--set",
    "sets",
    metavar="KEY=VALUE",
    multiple=True,
    shell_complete=completion.settings,
    help="Override a key of the plan: --set run.steps=20.",
)
run = click.argument("run", metavar="RUN", type=click.Path(), shell_complete=completion.runs)
step = click.option(
    "--step",
    type=click.IntRange(min=1),
    shell_complete=completion.steps,
    help="The checkpoint of this step. Default: the newest that all stages have.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON with a versioned schema on stdout.")
where = click.argument("where", type=click.Path(), required=False, shell_complete=completion.runs_and_plans)
lifeline = click.option(
    "--lifeline", type=int, default=-1, hidden=True, help="Descriptor of a pipe; exit once its other end is closed."
)
PATIENCE = 3.0  # seconds to wait for the broker's answer
RUNS = Path("runs")


class Bytes(click.ParamType[int]):
    """Size as plans have it: 1048576 or "512MiB"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the size in bytes; fail for any other text."""
        from pydantic import TypeAdapter, ValidationError

        from stageline.pipeline.plan.keys.key_types import Size

        try:
            found: int = TypeAdapter(Size).validate_python(int(value) if str(value).isdecimal() else value)
            return found
        except ValidationError:
            self.fail(f'{value!r} is not a size in bytes, such as 1048576 or "512MiB"', param, ctx)


class Finite(click.FloatRange):
    """Number within bounds; "nan" and numbers too large for a float are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; fail if it is not finite."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def run_id(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the run's id, from the id, its folder, or ""; the callback of an option that takes a run.

    Raises `click.BadParameter` for other texts.

    Args:
        ctx: Context of the command.
        parameter: Option.
        value: Given text, or None.
    """
    try:
        if value and runs.is_run(Path(value)):
            return Path(value).resolve().name
        return msgspec.convert(value, RunId) if value else value
    except msgspec.ValidationError:
        wanted = "letters, digits and - _ . with a letter or digit first, 200 at most"
        raise click.BadParameter(f"{value!r} is no run's id: {wanted}") from None


def stage_label(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the stage, such as "1" or, for a replica, "1.0"; the callback of an option that takes a stage.

    Raises `click.BadParameter` for other texts.

    Args:
        ctx: Context of the command.
        parameter: Option.
        value: Given text, or None.
    """
    if value is None or re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return value
    raise click.BadParameter(f"{value!r} is no stage: write its number, such as 1, or that of a replica, such as 1.0")


def step_range(ctx: click.Context, parameter: click.Parameter, value: str | None) -> range | None:
    """Return the steps of "A..B", both included; the callback of an option that takes several steps.

    Raises `click.BadParameter` for other texts.

    Args:
        ctx: Context of the command.
        parameter: Option.
        value: Given text, or None.
    """
    if value is None:
        return None
    if (found := re.fullmatch(r"([0-9]{1,15})\.\.([0-9]{1,15})", value)) is None:
        raise click.BadParameter(f"{value!r} is not A..B: write 118..120, both counted from 0")
    return range(int(found[1]), int(found[2]) + 1)


def require_existence(where: str) -> None:
    """Raise `CommandFailed` if `where`, the folder of a run or a plan, does not exist."""
    if not Path(where).exists():
        raise CommandFailed(f"{where} does not exist: name the folder of a run, or a plan", ExitCode.REFUSED)


def plan_of(config: str, sets: Sequence[str], broker: str = "") -> "plans.Plan":
    """Return the plan that the command line and the environment name; warnings go to stderr.

    `script:plan` is the plan of the script that this process was forked from. The address in an option overrules
    that of the `broker` in the plan.
    """
    if is_of_script(config):
        return cast("plans.Plan", script_object(config, "CONFIG"))
    with user_prints_to_stderr():  # a function may list its schedule
        plan = read_plan(config, sets=sets, environment=os.environ)
    plan = plan.at(broker) if broker else plan
    warn(plan.warnings)
    return plan


def plan_of_run(folder: Path, config: str | None, sets: Sequence[str]) -> "plans.Plan":
    """Return the plan of the run in `folder`, with the run's measured cut. Raises `CommandFailed` without a plan.

    Args:
        folder: Folder of the run.
        config: Plan; None for that of the command that has begun the run, with its --set.
        sets: Overridden keys, whose layout replaces the command's.
    """
    plan = plan_of(config, sets) if config is not None else _plan_of_begun(folder, sets)
    cut = runs.recorded_cut(plan, folder)
    return plan if cut is None else plan.with_cut(cut)


def _plan_of_begun(folder: Path, sets: Sequence[str]) -> "plans.Plan":
    owner = read_owner(folder)
    if owner is None or not owner.plan or not Path(owner.plan).exists():
        known = "" if owner is None or not owner.plan else f", which was {owner.plan}"
        raise CommandFailed(f"the plan of run {folder.name} is not here{known}: name it with --plan", ExitCode.USAGE)
    replaced = _LAYOUT if any(each.startswith(_LAYOUT) for each in sets) else ()
    kept = [each for each in owner.sets if not each.startswith(replaced)]
    say(f"stageline: using the plan {owner.plan} of that run; its model and data code is executed", err=True)
    return plan_of(owner.plan, [*kept, *sets])


def tell(text: str) -> None:
    """Print a message besides a command's result on stderr."""
    say(f"stageline: {text}", err=True)


def warn(warnings: Sequence[str]) -> None:
    """Print warnings on stderr."""
    for warning in warnings:
        say(f"stageline: warning: {warning}", err=True)


def require_restarts(plan: "plans.Plan", why: str = "a spare has nothing to wait for") -> None:
    """Raise `click.UsageError`, which says `why`, if no worker of the plan is replaced."""
    if not plan.recovery.on:
        lacks = "restarts=5" if not plan.recovery.restarts else "snapshot_every=20"
        raise click.UsageError(f"{why}: no worker is replaced; add --set recovery.{lacks}")


def plan_arguments(config: str, sets: Sequence[str]) -> list[str]:
    """Return the plan as arguments for another stageline command. They may contain passwords: not to be printed."""
    return [config, *(argument for each in sets for argument in ("--set", each))]


def without_passwords(sets: Sequence[str]) -> list[str]:
    """Return the `sets` without a password, which may be printed."""
    values = {each: each.partition("=")[2].strip().strip("\"'") for each in sets}
    return [each for each, value in values.items() if masked(value) == value]


def user_prints_to_stderr() -> contextlib.redirect_stdout[TextIO]:
    """Return a context in which the user's code prints to stderr: stdout is for the command's result."""
    return contextlib.redirect_stdout(sys.stderr)


def width() -> int | None:
    """Return the columns of stdout, None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def ascii_only() -> bool:
    """Return True if stdout can show nothing but ASCII."""
    stream = sys.stdout if hasattr(sys.stdout, "encoding") else sys.__stdout__  # a screen takes the place of stdout
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") != "utf8"


def answer_about(where: str | None, broker: str | None, query: str, **of: str) -> Facts:
    """Return the answer to a question about a run, from its broker or its records.

    `source` is "broker" or "records", `as_of` the time at which it was true, in seconds since the epoch.

    Args:
        where: Folder of a run, or a plan; None for the newest run in ./runs.
        broker: Address of the only broker to ask, in place of `where` and its records; None for the run's own.
        query: Question, such as "status".
        **of: Parameters of the question.

    Raises:
        BrokerUnreachable: `broker` does not answer; without it, no broker of the run does, and it has no records.
        CommandFailed: The question is refused.
        QueryRefused, PlanRefused, RecordsDamaged, StoreUnusable: The records cannot answer.
    """
    if broker is not None:
        return _from_broker(broker, query, of)
    found = _find(where)
    unreachable: BrokerUnreachable | None = None
    for url in found.brokers():
        try:
            return _from_broker(url, query, of)
        except BrokerUnreachable as error:  # it is killed at this moment, or hangs: the records tell how far it came
            unreachable = error
    if found.run is not None:
        return _from_records(found.run, found.store, query, of)
    raise unreachable or BrokerUnreachable(found.absence)


@contextlib.contextmanager
def asking(where: str | None, broker: str | None) -> Iterator[Callable[..., Facts]]:
    """Return a context whose value asks a run's broker over one connection, for many questions in a row.

    Args:
        where: Folder of a run, or a plan; None for the newest run in ./runs.
        broker: Address of the only broker to ask.

    Raises:
        BrokerUnreachable: No broker answers.
        CommandFailed: A question is refused.
    """
    found = Whereabouts() if broker is not None else _find(where)
    url = next(found.brokers(), None) if broker is None else broker
    if url is None:
        raise BrokerUnreachable(found.absence or f"no broker of {found.run} answers: see `stageline status`")
    try:
        url, pair = entered(given(url), os.environ, "stageline", PATIENCE)
        with Client(url, pair=pair) as client:
            yield lambda query, **of: client.ask(query, PATIENCE, **of)
    except ValueError as refusal:
        raise CommandFailed(str(refusal), ExitCode.USAGE) from refusal


@contextlib.contextmanager
def questioning(where: str | None, broker: str | None) -> Iterator[Callable[..., Facts]]:
    """Return a context whose value asks as `asking` has it; without a broker, it asks the run's records.

    A question that the records cannot answer raises `QueryRefused`.
    """
    found = Whereabouts() if broker is not None else _find(where)
    if found.run is None or next(found.brokers(), None) is not None:
        with asking(where, broker) as ask:
            yield ask
        return
    from stageline.workers.runs.listing import recorded_answer  # imports pydantic
    from stageline.workers.runs.records import recorded_run

    with recorded_run(found.run, found.store) as recorded:
        yield lambda query, **of: recorded_answer(recorded, query, of)


def folder_of(where: str | None) -> Path:
    """Return the folder of the run that `where` names. Raises `CommandFailed` if there is none."""
    found = _find(where)
    if found.run is None:
        raise CommandFailed(found.absence, ExitCode.USAGE)
    return found.run


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Places at which a run was found: its folder, and the broker and store that a plan names.

    `absence` is the error if there are none.
    """

    run: Path | None = None
    broker: str | None = None
    store: str | None = None
    absence: str = ""

    def brokers(self) -> Iterator[str]:
        """Yield addresses at which a broker may answer: on this machine, only those at which a process listens."""
        known = None if self.run is None else runs.read_broker_url(self.run)
        if known is not None and self.run is not None and _may_live(self.run) and backend_of(known).listens(known):
            yield known
        if self.broker is not None and backend_of(self.broker).listens(self.broker):
            yield self.broker


def _may_live(run: Path) -> bool:
    """Return True if the process that the run belongs to may be there: after its end, `train`'s broker is gone too."""
    try:
        owner = read_owner(run)
    except ValueError:
        return True
    return owner is None or owner.alive is not False


def _from_broker(url: str, query: str, of: dict[str, str]) -> Facts:
    with asking(None, url) as ask:
        return {**ask(query, **of), "source": "broker", "as_of": time()}


def _from_records(run: Path, store: str | None, query: str, of: dict[str, str]) -> Facts:
    from stageline.workers.runs.listing import recorded_answer  # imports pydantic
    from stageline.workers.runs.records import recorded_run

    with recorded_run(run, store) as recorded:
        result = None if recorded.result is None or query != "status" else msgspec.to_builtins(recorded.result)
        facts = recorded_answer(recorded, query, of)
        facts |= {"source": "records", "as_of": recorded.as_of, "folder": str(run), "state": str(recorded.state)}
        return facts | ({"result": result} if result else {})


def _find(where: str | None) -> Whereabouts:
    if where is not None and runs.is_known(Path(where)):
        return Whereabouts(run=Path(where))
    if where is not None:
        require_existence(where)
    elif (newest := runs.newest_in(RUNS)) is not None:
        return Whereabouts(run=newest)
    elif url := os.environ.get("STAGELINE_BROKER__URL"):
        return Whereabouts(broker=url, absence=f"no broker listens at {masked(url)}")
    elif not Path("stageline.toml").exists():
        return Whereabouts(
            absence="no run is in ./runs, and no plan is here: name the folder of a run, a plan, or a broker's address "
            "with --broker; `stageline train CONFIG` begins a run"
        )
    return _find_by_plan(where or ".")


def _find_by_plan(config: str) -> Whereabouts:
    with user_prints_to_stderr():
        plan = read_plan(config, environment=os.environ)
    found = [each for each in runs.all_in(plan.run.dir) if each.name.startswith(f"{plan.run.name}-")]
    return Whereabouts(
        found[-1] if found else None,
        plan.broker.url,
        plan.broker.store,
        f"no broker listens at {masked(plan.broker.url)}, and no run of {plan.run.name} is in {plan.run.dir}; "
        f"`stageline train {config}` begins one",
    )
