"""Arguments and options that several commands share, and the kinds of value that they take."""

import contextlib
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import click
import msgspec

from stageline.broker.control.records import RunId
from stageline.pipeline import addresses
from stageline.pipeline import plan as plans  # pydantic is imported when a plan is read
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.model.object_names import is_of_script, script_object
from stageline.pipeline.model.own_schedule import read_plan
from stageline.workers.runs import folder as runs

from .output import CommandFailed, say

Callback = Callable[[click.Context, click.Parameter, str | None], str | None]
_VISIBLE = (
    "contains a password, and every user of this machine can read a command line (ps). Leave the option out and put "
    "the address into the environment, as STAGELINE_BROKER__URL, or into a plan file that only you can read"
)

_LAYOUT = ("model.cut=", "model.stages=", "workers.")  # a cut and a number of stages of two commands do not fit


config = click.argument("config", type=click.Path(), default=".")  # a folder stands for the plan in it
sets = click.option(
    "--set", "sets", metavar="KEY=VALUE", multiple=True, help="Override a key of the plan: --set run.steps=20."
)
run = click.argument("run", metavar="RUN", type=click.Path())
step = click.option(
    "--step", type=click.IntRange(min=1), help="The checkpoint of this step. Default: the newest that all stages have."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON with a versioned schema on stdout.")
where = click.argument("where", type=click.Path(), required=False)
lifeline = click.option(
    "--lifeline", type=int, default=-1, hidden=True, help="Descriptor of a pipe; exit once its other end is closed."
)


class Bytes(click.ParamType[int]):
    """A size as plans have it: 1048576 or "512MiB"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from pydantic import TypeAdapter, ValidationError

        from stageline.pipeline.plan.keys.key_types import Size

        try:
            found: int = TypeAdapter(Size).validate_python(int(value) if str(value).isdecimal() else value)
            return found
        except ValidationError:
            self.fail(f'{value!r} is not a size in bytes, such as 1048576 or "512MiB"', param, ctx)


class Finite(click.FloatRange):
    """A number within bounds; refuses "nan" and what is too large for a float."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def address(*, dials: bool) -> Callback:
    """The callback of an option that takes the broker's address: to connect to (`dials`), or to listen at."""

    def checked(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is None:
            return None
        if fault := _address_fault(value, dials=dials):
            raise click.BadParameter(
                f"{masked(value)!r} is not an address of a broker: {fault}; "
                f"write {' or '.join(addresses.broker_schemes().values())}"
            )
        if masked(value) != value:
            say(f"stageline: warning: {parameter.opts[0]} {_VISIBLE}", err=True)
        return value

    return checked


def run_id(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that takes a run: its id, which is the name of its folder, the folder, or ""."""
    try:
        if value and runs.is_run(Path(value)):
            return Path(value).resolve().name
        return msgspec.convert(value, RunId) if value else value
    except msgspec.ValidationError:
        wanted = "letters, digits and - _ . with a letter or digit first, 200 at most"
        raise click.BadParameter(f"{value!r} is no run's id: {wanted}") from None


def _address_fault(url: str, *, dials: bool) -> str | None:
    if (fault := addresses.fault(url, addresses.broker_schemes())) is not None:
        return fault or f"it begins with {' or '.join(f'{scheme}://' for scheme in addresses.broker_schemes())}"
    scheme, _, rest = url.partition("://")
    if not rest:
        return f"{scheme}:// goes with a path"
    if dials and addresses.transport_of(url).has_free_port(url):
        return "its port must be the one that the broker listens at"
    return None


def stage_label(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that takes a stage: "1", or a replica of it, "1.0"."""
    if value is None or re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return value
    raise click.BadParameter(f"{value!r} is no stage: write its number, such as 1, or that of a replica, such as 1.0")


broker = click.option(
    "--broker", callback=address(dials=True), metavar="URL", help="The broker's address. Default: found from WHERE."
)


def require_existence(where: str) -> None:
    """Raise `CommandFailed` if `where`, the folder of a run or a plan, does not exist."""
    if not Path(where).exists():
        raise CommandFailed(f"{where} does not exist: name the folder of a run, or a plan", ExitCode.REFUSED)


def plan_of(config: str, sets: Sequence[str]) -> "plans.Plan":
    """The plan that the command line and the environment name; warnings go to stderr. `script:plan` is that of the
    script which this process was forked from."""
    if is_of_script(config):
        return cast("plans.Plan", script_object(config, "CONFIG"))
    with user_prints_to_stderr():  # a function may list its schedule
        plan = read_plan(config, sets=sets, environment=os.environ)
    warn(plan.warnings)
    return plan


def plan_of_run(folder: Path, config: str | None, sets: Sequence[str]) -> "plans.Plan":
    """The plan in `config`, or without it that of the command that has begun the run in `folder`, with its --set; then
    `sets`, whose layout replaces the command's. A cut that was measured is the run's. Raises `CommandFailed` if the
    plan is not there."""
    plan = _plan_of_run(folder, config, sets)
    cut = runs.recorded_cut(plan, folder)
    return plan if cut is None else plan.with_cut(cut)


def _plan_of_run(folder: Path, config: str | None, sets: Sequence[str]) -> "plans.Plan":
    from stageline.workers.runs.owner import read_owner

    if config is not None:
        return plan_of(config, sets)
    owner = read_owner(folder)
    if owner is None or not owner.plan or not Path(owner.plan).exists():
        known = "" if owner is None or not owner.plan else f", which was {owner.plan}"
        raise CommandFailed(f"the plan of run {folder.name} is not here{known}: name it with --plan", ExitCode.USAGE)
    replaced = _LAYOUT if any(each.startswith(_LAYOUT) for each in sets) else ()
    kept = [each for each in owner.sets if not each.startswith(replaced)]
    say(f"stageline: using the plan {owner.plan} of that run; its model and data code is executed", err=True)
    return plan_of(owner.plan, [*kept, *sets])


def tell(text: str) -> None:
    """Print what a command has to say besides its result on stderr."""
    say(f"stageline: {text}", err=True)


def warn(warnings: Sequence[str]) -> None:
    """Print warnings on stderr."""
    for warning in warnings:
        say(f"stageline: warning: {warning}", err=True)


def require_restarts(plan: "plans.Plan") -> None:
    """Raise `click.UsageError` if the plan has no use for spare workers."""
    if not plan.recovery.on:
        raise click.UsageError("a spare has nothing to wait for: no worker is replaced; add --set recovery.restarts=5")


def plan_arguments(config: str, sets: Sequence[str]) -> list[str]:
    """The same plan, as arguments for another stageline command. They may contain passwords: not to be printed."""
    return [config, *(argument for each in sets for argument in ("--set", each))]


def without_passwords(sets: Sequence[str]) -> list[str]:
    """Those of `sets` that may be printed."""
    values = {each: each.partition("=")[2].strip().strip("\"'") for each in sets}
    return [each for each, value in values.items() if masked(value) == value]


def user_prints_to_stderr() -> contextlib.redirect_stdout[TextIO]:
    """A context in which what a user's code prints goes to stderr: stdout is for the command's result."""
    return contextlib.redirect_stdout(sys.stderr)


def width() -> int | None:
    """The columns of stdout, None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def ascii_only() -> bool:
    """Return True if stdout can show nothing but ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
