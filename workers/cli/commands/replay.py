"""`stageline replay`: runs one microbatch of one stage again, alone, under a debugger if wanted."""

from bdb import BdbQuit
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stageline.pipeline.errors import ExitCode, cause_of, traceback_text
from stageline.workers.cli import completion, options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import CommandFailed, answer, say

if TYPE_CHECKING:  # loads torch
    from stageline.workers.extras.recording.replay import Replayed

_RECORDED = "recorded"  # the folder of a run's records
_SAME = {True: "the bits as recorded", False: "OTHER BITS than recorded", None: "nothing recorded to compare with"}


@click.command(
    cls=Command,
    examples=(
        "stageline replay examples/digits --stage 0 --step 0 --microbatch 0",
        "stageline replay runs/digits-20260131-101500-1f0c --stage 1 --step 118 --microbatch 5",
    ),
    groups={"Microbatch": ("--stage", "--step", "--microbatch", "--messages")},
    codes=codes(
        ExitCode.REFUSED,
        ok="the recorded bits, or failure, again",
        failed="other bits, or the record is damaged",
        usage="an option is wrong, or the microbatch was not recorded",
        interrupted="interrupted, or left the debugger",
    ),
)
@click.argument("where", type=click.Path(), shell_complete=completion.runs_and_plans)
@options.sets
@click.option(
    "--stage",
    callback=options.stage_label,
    shell_complete=completion.stages,
    required=True,
    help='Which stage, counted from 0, or replica, as "1.0".',
)
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step, counted from 0.")
@click.option("--microbatch", type=click.IntRange(min=0), required=True, help="The microbatch, counted from 0.")
@click.option(
    "--messages",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    help="A file that `queue export` wrote; can be given several times.",
)
@options.as_json
def replay(
    where: str,
    sets: tuple[str, ...],
    stage: str,
    step: int,
    microbatch: int,
    messages: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run one microbatch of one stage again, and compare its bits.

    The microbatch runs alone, in this process; its bits are compared with the recorded ones. WHERE is a run's folder,
    or a plan, whose newest run is used. breakpoint() in the model stops at this microbatch, and only there; what the
    model prints goes to stderr.

    This executes code: the model, data, loss, metrics and optimizer that the plan names. Of a run's folder, the plan is
    in recorded/stage-N/about.json, and files such as model.py are taken from where it says that the plan's file is.
    Look at both before you replay a folder from elsewhere. The files are printed before they are executed.
    """
    folder, plan = Path(where), None
    from stageline.workers.runs import folder as runs

    if not runs.is_run(folder):
        options.require_existence(where)
        plan = options.plan_of(where, sets)
        folder = runs.newest(plan)
    if messages and plan is None and not (folder / _RECORDED).exists():
        plan = options.plan_of_run(folder, None, sets)
    from stageline.pipeline.model.load import code_of
    from stageline.workers.extras.recording import replay as again

    copy = int(stage) if stage.isdecimal() else _copy(folder, stage)
    say(f"stageline: executes {', '.join(code_of(plan or again.recorded_plan(folder, copy)))}", err=True)
    with options.user_prints_to_stderr():
        found = again.replay(folder, again.ReplayTarget(copy, step, microbatch), plan, [*map(Path, messages)])
    cause = cause_of(found.error) if found.error else None
    if issubclass(type(cause), BdbQuit):  # `isinstance` may ask the exception, whose class may be the user's
        raise CommandFailed("left the debugger", ExitCode.INTERRUPTED)
    if cause is not None:
        say(traceback_text(cause), err=True)
    place = {"stage": copy, "step": step, "microbatch": microbatch}
    facts = {"schema": "replay/1", "run": found.run, **place, **_facts(found)}
    results = [f"{each.action}  {each.found}: {_SAME[each.same]}" for each in found.outcomes]
    notes = [f"{when}: {text}" for when, text in found.notes.items()]
    title = f"stage {stage}, step {step}, microbatch {microbatch} of run {found.run}"
    answer(facts, as_json, lambda: say("\n  ".join([title, found.beginning, *results, *notes])))
    if not found.reproduced:
        raise CommandFailed(found.verdict, ExitCode.FAILED, answered=True)


def _copy(folder: Path, label: str) -> int:
    """Return the number of the replica with the name `label`."""
    from stageline.pipeline.schedule.replicas import replicas_of
    from stageline.workers.checkpoint.source import source_in

    plan = source_in(folder).plan
    found = replicas_of(plan.shares, plan.schedule.in_step).copy_of(label) if plan.shares else None
    if found is None:
        raise CommandFailed(f"there is no stage {label}: stages with replicas have such names", ExitCode.USAGE)
    return found


def _facts(replayed: "Replayed") -> dict[str, object]:
    return {
        "snapshot": replayed.start,
        "actions_before": replayed.before,
        "outcomes": [{"action": each.action, "gave": each.found, "same": each.same} for each in replayed.outcomes],
        "stopped_the_run": replayed.notes.get("in the run"),
        "raised": replayed.notes.get("now"),
        "reproduced": replayed.reproduced,
    }
