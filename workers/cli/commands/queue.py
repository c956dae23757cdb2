"""`stageline queue`: the queues of a run, one row each; both ends of one of them; and what it retains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from stageline.broker.control.answers import ExportFacts
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, completion, options
from stageline.workers.cli.asking.looking import look, number_and_run, watched
from stageline.workers.cli.help import Command, CommandGroup, codes
from stageline.workers.cli.output import answer, counted, say, size
from stageline.workers.cli.output import show as show_table
from stageline.workers.cli.tables.queues import queue_lines, show_queues
from stageline.workers.runs.folder import Facts

_CODES = codes(
    ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, ExitCode.REFUSED, usage="an option is wrong, or no such queue"
)
Row = Mapping[str, Any]
_at = click.option("--at", type=click.IntRange(min=0), help="The N messages from this number on. Default: the newest.")


@click.group(cls=CommandGroup)
def queue() -> None:
    """Inspect the queues of a run."""


@queue.command(
    examples=("stageline queue ls runs/digits-20260131-101500-1f0c", "stageline queue ls --watch"), codes=_CODES
)
@options.where
@watched
@broker_address.broker
@options.as_json
def ls(where: str | None, watch: float | None, broker: str | None, as_json: bool) -> None:
    """List the queues: what was put and taken, what they hold, and how fast they move.

    A row is a queue, as the processes at its two ends last reported it. Positions (put, taken) count messages over the
    run. A terminal shows as many columns as fit. WHERE is a run's folder, or a plan, whose newest run is meant.
    Default: the newest run in ./runs.
    """
    look("queues", where, broker, as_json, show_queues, watch)


@queue.command(
    cls=Command,
    examples=("stageline queue show forward-1", "stageline queue show backward-0 runs/digits-20260131-101500-1f0c"),
    codes=_CODES,
)
@click.argument("name", metavar="QUEUE")
@options.where
@watched
@broker_address.broker
@options.as_json
def show(name: str, where: str | None, watch: float | None, broker: str | None, as_json: bool) -> None:
    """Show both ends of a queue: positions, sizes, and what was sent again and why.

    WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs.
    """
    look("queue", where, broker, as_json, lambda facts: say("\n".join(queue_lines(facts))), watch, {"name": name})


@queue.command(
    cls=Command,
    examples=("stageline queue peek forward-1", "stageline queue peek backward-0 5 --at 118 --json"),
    groups={"Messages": ("--at",)},
    codes=_CODES,
)
@click.argument("name", metavar="QUEUE")
@click.argument("more", metavar="[N] [WHERE]", nargs=-1, shell_complete=completion.runs_and_plans)
@_at
@broker_address.broker
@options.as_json
def peek(name: str, more: tuple[str, ...], at: int | None, broker: str | None, as_json: bool) -> None:
    """Look at the messages that a queue retains: shapes, types, and a summary of their numbers.

    Shows the newest N messages, by default one, 64 at most. The worker that retains them answers beside its
    computation; delivery is not disturbed. In a run with keys, and of batches that must stay where they are, only
    shapes and types are told. WHERE is a run's folder, or a plan, whose newest run is meant.
    Default: the newest run in ./runs.
    """
    count, where = number_and_run(more, "a number of messages")
    look("peek", where, broker, as_json, _show_messages, None, _asked(name, count or 1, at))


@queue.command(
    cls=Command,
    examples=(
        "stageline queue export forward-1 -o forward-1.messages",
        "stageline queue export backward-0 8 --at 944 -o gradients.messages",
    ),
    groups={"Messages": ("--at", "--output")},
    codes=_CODES,
)
@click.argument("name", metavar="QUEUE")
@click.argument("more", metavar="[N] [WHERE]", nargs=-1, shell_complete=completion.runs_and_plans)
@_at
@click.option(
    "-o", "--output", "output", type=click.Path(), required=True, help="File to write, which is not there yet."
)
@broker_address.broker
@options.as_json
def export(name: str, more: tuple[str, ...], at: int | None, output: str, broker: str | None, as_json: bool) -> None:
    """Write the messages that a queue retains into a file, for `stageline replay --messages`.

    Writes the newest N messages, by default all: those since the newest checkpoint, which are what a stage needs to
    compute a microbatch again. WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run
    in ./runs.
    """
    count, where = number_and_run(more, "a number of messages")
    options.answer_about(where, broker, "peek", **_asked(name, 1, at))  # refused before anything long begins
    from stageline.workers.cli.asking import exporting  # imports torch

    with options.asking(where, broker) as ask:
        known = ask("peek", **_asked(name, 1, at))
        numbers = exporting.export(ask, name, _wanted(known, count, at), Path(output))
    size_of_file = Path(output).stat().st_size
    found = ExportFacts(run=known["run"], queue=name, file=output, messages=numbers, bytes=size_of_file)
    facts = {"schema": "queue-export/1", **msgspec.structs.asdict(found)}
    written = f"{output}: {counted(len(numbers), 'message')} of {name}, {numbers[0]} to {numbers[-1]}"
    answer(facts, as_json, lambda: say(written))


def _wanted(known: Facts, count: int | None, at: int | None) -> range:
    """Return the numbers of the messages to export: `count` from `at` on, or the newest, or all."""
    first, end = known["first"], known["end"]
    if at is not None:
        return range(at, end if count is None else min(end, at + count))
    return range(first if count is None else max(first, end - count), end)


def _asked(name: str, count: int, at: int | None) -> dict[str, str]:
    return {"name": name, "count": str(count), **({} if at is None else {"at": str(at)})}


def _show_messages(facts: Facts) -> None:
    first, end = facts["first"], facts["end"]
    kept = f"retains {first} to {end - 1}" if first < end else "retains none"
    rows = [_message(each, tensor) for each in facts["messages"] for tensor in each["tensors"] or [None]]
    columns = ("message", "of", "size", "kept in", "tensor", "least", "mean", "greatest", "NaN", "inf")
    title = f"queue {facts['queue']} of run {facts['run']}: worker {facts['worker']} {kept}"
    if rows:
        show_table(title, columns, rows)
    else:
        say(f"{title}, and none of the messages asked for")
    if facts["withheld"]:
        say(f"numbers are withheld: {facts['withheld']}")
    for each in facts["messages"]:
        if each["damage"]:
            say(f"message {each['place']['number']}: {each['damage']}")


def _message(message: Row, tensor: Row | None) -> tuple[object, ...]:
    place = message["place"]
    name = f"{place['unit']} {place['index']}, microbatch {place['microbatch']}"
    about = (place["number"], name, size(message["bytes"]), "disk" if message["on_disk"] else "memory")
    if tensor is None:
        return (*about, "-", *["-"] * 5)
    shape = f"{tensor['path']} {tensor['dtype']} {tensor['shape']}".strip()
    values = tensor["values"]
    if values is None:
        return (*about, shape, *["-"] * 5)
    numbers = ["-" if values[each] is None else f"{values[each]:.4g}" for each in ("least", "mean", "greatest")]
    return (*about, shape, *numbers, values["nan"], values["infinite"])
