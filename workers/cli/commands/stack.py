"""`stageline stack`: what the workers of a run execute at this moment."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from time import time

import click
import msgspec

from stageline.broker.control.answers import StackFacts, StackFrame, ThreadStack, WorkerStacks
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, completion, options
from stageline.workers.cli.asking.looking import number_and_run
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import CommandFailed, answer, counted, say
from stageline.workers.runs.folder import Facts

_LOOP = "/workers/runtime/loop.py"  # what runs around it is the same in all workers
_BARE_LOOP = "loop.py"  # of a worker that shows names of files alone


@click.command(
    cls=Command,
    examples=("stageline stack", "stageline stack 1 runs/digits-20260131-101500-1f0c --all"),
    groups={"Threads": ("--all",)},
    codes=codes(
        ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, ExitCode.REFUSED, usage="an option is wrong, or no such worker"
    ),
)
@click.argument("more", metavar="[WORKER] [WHERE]", nargs=-1, shell_complete=completion.runs_and_plans)
@click.option("--all", "every", is_flag=True, help="Show all threads of a worker. Default: the one that computes.")
@broker_address.broker
@options.as_json
def stack(more: tuple[str, ...], every: bool, broker: str | None, as_json: bool) -> None:
    """Show the Python stacks of the workers, equal ones once.

    Each worker's control thread reads the stacks, so the worker goes on and no debugger is needed. WORKER is a worker's
    number. Default: all workers. WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run
    in ./runs.
    """
    worker, where = number_and_run(more, "the number of a worker")
    with options.asking(where, broker) as ask:
        status = ask("status")
        found = [_stacks(ask, number, name) for number, name in _wanted(status, worker)]
    if not every:
        found = [msgspec.structs.replace(each, threads=each.threads[:1]) for each in found]
    facts = StackFacts(run=status["run"], workers=found)
    beside = {"schema": "stack/1", "source": "broker", "as_of": time()}
    answer({**beside, **msgspec.to_builtins(facts)}, as_json, lambda: say("\n".join(_lines(facts))))


def _wanted(status: Facts, worker: int | None) -> list[tuple[int, str]]:
    """Return the workers to ask, with their names, "" for a place that has no worker now.

    Raises `CommandFailed` if there is none to ask.
    """
    places = {each["index"]: each.get("name", "") for each in status["workers"]}
    known = {place: name for place, name in places.items() if name}
    if worker is None and known:
        return sorted(places.items())
    if worker is not None and worker in known:
        return [(worker, known[worker])]
    asked = "no worker has" if worker is None else f"worker {worker} has not"
    joined = ", ".join(map(str, sorted(known))) or "none"
    raise CommandFailed(f"{asked} joined run {status['run']}; workers that have: {joined}", ExitCode.USAGE)


def _stacks(ask: Callable[..., Facts], worker: int, name: str) -> WorkerStacks:
    if not name:
        return WorkerStacks(worker=worker, name="", missing="is not there", threads=[])
    try:
        facts = ask("stack", worker=str(worker))
    except ValueError as refusal:
        return WorkerStacks(worker=worker, name=name, missing=str(refusal), threads=[])
    return msgspec.convert(facts["workers"][0], WorkerStacks)


def _lines(facts: StackFacts) -> Iterator[str]:
    yield f"run {facts.run}: the innermost function of a thread is the last"
    same: dict[str, list[str]] = defaultdict(list)
    for each in facts.workers:
        for thread in each.threads:
            same["\n".join(_thread(thread))].append(f"worker {each.worker} ({each.name}), thread {thread.thread}")
    for text, threads in same.items():
        title = "" if len(threads) == 1 else f"{counted(len(threads), 'thread')} in the same place: "
        yield f"{title}{'; '.join(threads)}"
        yield text
    for each in facts.workers:
        if each.missing:
            name = f" ({each.name})" if each.name else ""
            yield f"worker {each.worker}{name}: {each.missing}"


def _thread(thread: ThreadStack) -> Iterator[str]:
    """Yield the functions of a thread; of the one that computes, those within the compute loop."""
    outer = next((place for place, frame in enumerate(thread.frames) if _is_loop(frame)), 0)
    if left_out := thread.left_out + outer:
        yield f"  {counted(left_out, 'outer function')} left out"
    for frame in thread.frames[outer:]:
        yield from _frame(frame)


def _is_loop(frame: StackFrame) -> bool:
    return frame.file.endswith(_LOOP) or (frame.file, frame.function) == (_BARE_LOOP, "run")


def _frame(frame: StackFrame) -> Iterator[str]:
    yield f"  {frame.file}:{frame.line} in {frame.function}"
    if frame.text:
        yield f"    {frame.text}"
