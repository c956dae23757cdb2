"""`stageline trace`: steps of a run as a file for Perfetto, in which one looks at a long stretch of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stageline.broker.control.answers import TraceFacts
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, options
from stageline.workers.cli.help import CommandGroup, codes
from stageline.workers.cli.output import CommandFailed, answer, say, size
from stageline.workers.runs.folder import Facts

if TYPE_CHECKING:
    from stageline.workers.extras.run_trace import RunTrace

NEWEST = 1000  # steps that are exported, unless told otherwise
_ACTIONS = 4000  # in one answer of a broker, about
_RECORDS = 3000  # likewise: one of each copy of a stage in each step
_MOST = 63  # steps in one answer, besides the one before them
_NO_LOSSES = 10**14  # a step from which on no run has losses

Ask = Callable[..., Facts]


@click.group(cls=CommandGroup)
def trace() -> None:
    """Write steps of a run into a file for Perfetto."""


@trace.command(
    examples=(
        "stageline trace export runs/digits-20260131-101500-1f0c -o run.pftrace",
        "stageline trace export --steps 118..320 --broker tcp://10.0.0.4:5600 -o run.pftrace",
    ),
    groups={"Steps": ("--steps",), "Output": ("--output",)},
    codes=codes(ExitCode.NO_BROKER, ExitCode.REFUSED, usage="an option is wrong, or there are no such steps"),
)
@options.where
@broker_address.broker
@click.option(
    "--steps",
    metavar="A..B",
    callback=options.step_range,
    help=f"The first and the last step. Default: the newest {NEWEST}.",
)
@click.option("-o", "--output", "output", type=click.Path(dir_okay=False), required=True, help="File to write.")
@options.as_json
def export(where: str | None, broker: str | None, steps: range | None, output: str, as_json: bool) -> None:
    """Write steps as a trace, which https://ui.perfetto.dev opens.

    Has actions, waits with their causes, arrows that follow a microbatch, losses, and checkpoints and lost workers.
    WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs.
    """
    file = Path(output)
    with options.questioning(where, broker) as ask:
        found = ask("status", losses_from=str(_NO_LOSSES))
        wanted = _finished(found, steps)
        first, last, slices = _write(file, ask, found, wanted)
    facts = TraceFacts(run=found["run"], file=output, steps=[first, last], slices=slices, bytes=file.stat().st_size)
    written = f"{output}: steps {first} to {last} of run {facts.run}, {slices} actions and waits, {size(facts.bytes)}"
    shown = {"schema": "trace-export/1", **msgspec.structs.asdict(facts)}
    answer(shown, as_json, lambda: say(f"{written}; https://ui.perfetto.dev opens it"))


def _finished(found: Facts, steps: range | None) -> range:
    """Return the steps that are wanted and finished. Raises `CommandFailed` if there are none."""
    floor = found["finished_floor"]
    known = f"steps 0 to {floor - 1} are finished" if floor else "no step is finished yet"
    newest = range(max(0, floor - NEWEST), floor)
    wanted = newest if steps is None else range(steps.start, min(steps.stop, floor))
    if not wanted:
        named = "nothing to export" if steps is None else f"no step in {steps.start}..{steps.stop - 1}"
        raise CommandFailed(f"{named} of run {found['run']}: {known}", ExitCode.USAGE)
    return wanted


def _write(file: Path, ask: Ask, found: Facts, steps: range) -> tuple[int, int, int]:
    """Write the trace; return its first and last step, and the number of its slices."""
    from stageline.workers.extras.run_trace import RunTrace

    losses = {int(step): loss for step, loss in ask("status", losses_from=str(steps.start))["losses"].items()}
    made = RunTrace(found["run"], found["workers"], losses, ask("history")["milestones"])
    draft, numbers = file.with_name(f".{file.name}.part"), list[int]()
    try:
        with draft.open("wb") as opened:
            for packet in _packets(made, _asked(ask, found["plan"], steps), numbers):
                opened.write(packet)
            opened.writelines(made.rest(newest=steps.stop == found["finished_floor"]))
        if not numbers:
            raise CommandFailed(
                f"no times are known of steps {steps.start}..{steps.stop - 1} of run {found['run']}: they are kept of "
                "the newest 100000 steps, in the run's records",
                ExitCode.USAGE,
            )
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return numbers[0], numbers[-1], made.slices


def _packets(made: "RunTrace", steps: Iterator[Facts], numbers: list[int]) -> Iterator[bytes]:
    for step in steps:
        numbers[1:] = [step["step"]]
        yield from made.of_step(step)


def _asked(ask: Ask, plan: Facts, steps: range) -> Iterator[Facts]:
    """Yield the steps of which times are known, asked for few at a time.

    The step before the first of an answer is asked for, too: waits at the border of two steps have their cause by it.
    """
    copies = sum(map(len, plan["placement"]))
    at_once = max(1, min(_MOST, _ACTIONS // (2 * copies * plan["microbatches"]), _RECORDS // copies))
    for first in steps[::at_once]:
        last = min(first + at_once, steps.stop) - 1
        found = ask("timetable", first=str(max(0, first - 1)), last=str(last))
        yield from (each for each in found["steps"] if each["step"] >= first)
