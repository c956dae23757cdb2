"""`stageline metrics`: the measurements of a run, from the files in its folder."""

import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from time import sleep

import click
import msgspec
from msgspec import UNSET

from stageline.broker.errors import BrokerError
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.workers.cli import options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.monitoring.measured import asked_by
from stageline.workers.cli.monitoring.scraping import Address, ScrapeEndpoint
from stageline.workers.cli.options import folder_of
from stageline.workers.cli.output import CommandFailed, answer, say, show
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics import (
    METRICS,
    EvaluationMetrics,
    MetricsLine,
    MetricsTail,
    StepMetrics,
    metrics_in,
)
from stageline.workers.runs.owner import read_owner
from stageline.workers.runs.tensorboard import EventFile
from stageline.workers.runs.trackers import MlflowRun, RunEnd, Sink, WandbRun

ROWS = 30  # of steps, that a table has unless more are wanted
COLUMNS = ("step", "loss", "gradient norm", "learning rates", "rows", "time", "evaluation after so many steps")
_WIDTHS = (9, 12, 13, 14, 6, 19, 0)  # characters, of rows that are printed one by one
LOOK = 0.5  # seconds between two looks at the files of a run that goes on

Take = Callable[[MetricsLine], object]


def every_for(steps: int) -> int:
    """Return the distance of the steps that a table shows, 1, 2, 5, 10, ..., for about `ROWS` rows."""
    power = 1
    while power * 10 * ROWS < steps:
        power *= 10
    return next(each * power for each in (1, 2, 5, 10) if each * power * ROWS >= steps)


def cells(line: MetricsLine) -> tuple[str, ...]:
    """Return the cells of a line in the table."""
    time = f"{datetime.fromtimestamp(line.time):%F %T}"
    if isinstance(line, EvaluationMetrics):
        found = ", ".join(f"{name} {_number(value)}" for name, value in line.values.items())
        return (str(line.step), "", "", "", "", time, found)
    norm = "" if line.gradient_norm is UNSET else _number(line.gradient_norm)
    rates = " ".join(f"{rate:g}" for rate in line.learning_rates)
    return (str(line.step), _number(line.loss), norm, rates, str(line.rows), time, "")


def row(of: Iterable[str]) -> str:
    """Return a row by itself, of a table whose other rows are not known."""
    return "  ".join(cell.rjust(width) for cell, width in zip(of, _WIDTHS, strict=True)).rstrip()


def as_csv(lines: Iterable[MetricsLine]) -> str:
    """Return the lines as CSV, with a column for each learning rate and each metric."""
    every = list(lines)
    most = max((len(line.learning_rates) for line in every), default=0)
    rates = [f"learning_rate_{group}" for group in range(most)]
    names = {name: None for line in every for name in line.metrics}
    columns = ["kind", "step", "loss", "gradient_norm", *rates, "rows", "time", "fit", *names]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for line in every:
        facts = msgspec.to_builtins(line)
        of_groups = zip(rates, facts.pop("learning_rates", ()), strict=False)
        evaluated = facts.pop("metrics", {})
        writer.writerow({**facts, **dict(of_groups), **evaluated})
    return text.getvalue()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


@click.command(
    cls=Command,
    examples=("stageline metrics --follow", "stageline metrics runs/digits-20260131-101500-1f0c --csv > metrics.csv"),
    groups={
        "Run": ("--every", "--follow"),
        "Output": ("--csv",),
        "Other programs": ("--tensorboard", "--wandb", "--mlflow", "--prometheus"),
    },
    codes=codes(ExitCode.REFUSED, usage="an option is wrong, or the run has no metrics here"),
)
@options.where
@click.option("--every", type=click.IntRange(min=1), help="Show every N-th step. Default: all; about 30 in a table.")
@click.option("--follow", is_flag=True, help="Print new steps until the run ends.")
@click.option("--csv", "csv", is_flag=True, help="Print CSV on stdout.")
@click.option(
    "--tensorboard", metavar="DIR", type=click.Path(path_type=Path), help="Write event files for TensorBoard into DIR."
)
@click.option("--wandb", metavar="PROJECT", help="Write a run of Weights & Biases; WANDB_MODE=offline keeps it here.")
@click.option("--mlflow", metavar="EXPERIMENT", help="Write a run of MLflow, at MLFLOW_TRACKING_URI.")
@click.option(
    "--prometheus",
    metavar="[HOST:]PORT",
    type=Address(),
    help="Serve a run that goes on to Prometheus, as train --metrics does, until it ends.",
)
@options.as_json
def metrics(
    where: str | None,
    every: int | None,
    tensorboard: Path | None,
    wandb: str | None,
    mlflow: str | None,
    prometheus: tuple[str, int] | None,
    *,
    follow: bool,
    csv: bool,
    as_json: bool,
) -> None:
    """Show losses, gradient norms and evaluations of a run, by step.

    The table also has the learning rates. WHERE is a run's folder, or a plan, whose newest run is meant. Default: the
    newest run in ./runs. Metrics are read from the folder on the machine of the last stage's worker; what a script has
    evaluated, from the script's.
    """
    writes = (tensorboard, wandb, mlflow) != (None, None, None)
    if sum((csv, as_json, follow)) > 1 or (writes and (csv or as_json)):
        raise click.UsageError(
            "of --csv and --json take one, without --follow and what writes for other programs (--tensorboard, "
            "--wandb, --mlflow)"
        )
    if prometheus is not None and (writes or follow or csv or as_json or every is not None):
        raise click.UsageError("--prometheus goes alone: it asks the run's broker, and reads no files")
    folder = folder_of(where)
    if prometheus is not None:
        _serve(folder, prometheus)
    elif writes:
        _hand_over(folder, _sinks(folder, tensorboard, wandb, mlflow), every or 1, follow=follow)
    elif follow:
        _follow(folder, every or 1)
    elif as_json:
        lines = list(_chosen(_lines(folder), every or 1))
        answer({"schema": "metrics/1", "run": folder.resolve().name, "lines": lines}, as_json, tuple)
    elif csv:
        click.echo(as_csv(_chosen(_lines(folder), every or 1)), nl=False)
    else:
        _show(folder, every)


def _lines(folder: Path) -> Iterator[MetricsLine]:
    """Yield all lines in order; missing steps are told on stderr. Raises `CommandFailed` if there is no file."""
    try:
        found = metrics_in(folder)
    except FileNotFoundError:
        raise CommandFailed(
            f"{folder} has no {METRICS}: the worker of the last stage writes it, in the run's folder on its machine",
            ExitCode.USAGE,
        ) from None
    return _gaps_told(found, folder / METRICS)


def _gaps_told(lines: Iterable[MetricsLine], file: Path) -> Iterator[MetricsLine]:
    step = 0
    for line in lines:
        if isinstance(line, StepMetrics):
            if line.step > step:
                say(
                    f"stageline: warning: steps {step} to {line.step - 1} are not in {file}: their worker was on "
                    "another machine, or the run began from a checkpoint",
                    err=True,
                )
            step = line.step + 1
        yield line


def _chosen(lines: Iterable[MetricsLine], every: int) -> Iterator[MetricsLine]:
    """Yield each `every`-th step, and all evaluations."""
    return (line for line in lines if not isinstance(line, StepMetrics) or line.step % every == 0)


def _show(folder: Path, every: int | None) -> None:
    steps = 1 + max((line.step for line in _lines(folder) if isinstance(line, StepMetrics)), default=-1)
    every = every or every_for(steps)
    shown = "" if every == 1 else f", of which {every} make a row; --every 1 shows all"
    show(f"metrics of {folder}: {steps} steps{shown}", COLUMNS, list(map(cells, _chosen(metrics_in(folder), every))))


def _sinks(
    folder: Path, tensorboard: Path | None, wandb: str | None, mlflow: str | None
) -> Iterator[EventFile | WandbRun | MlflowRun]:
    """Yield what was asked for, each when it is to be opened."""
    if tensorboard is not None:
        yield EventFile(tensorboard, 0)
        options.tell(f"show them with: tensorboard --logdir {tensorboard}")
    if wandb is not None:
        yield WandbRun(wandb, folder)
    if mlflow is not None:
        yield MlflowRun(mlflow, folder)


def _hand_over(folder: Path, wanted: Iterable[EventFile | WandbRun | MlflowRun], every: int, *, follow: bool) -> None:
    """Hand the lines of a run, and with `follow` those that come, to other programs."""
    with ExitStack() as stack:
        lines = () if follow else _chosen(_lines(folder), every)
        sinks: list[Sink] = []
        for each in wanted:
            stack.enter_context(_left(each, folder))
            sinks.append(each)

        def take(line: MetricsLine) -> None:
            for sink in sinks:
                line.add_to(sink)

        if follow:
            _follow(folder, every, take)
        for line in lines:
            take(line)


@contextmanager
def _left(sink: EventFile | WandbRun | MlflowRun, folder: Path) -> Iterator[None]:
    """Return a context that leaves a run at a tracker as it is here: what ends the command is not the run's end."""
    state = RunEnd.RUNNING
    try:
        yield
        state = end_of(folder)
    finally:
        if isinstance(sink, EventFile):
            sink.end()
        else:
            sink.leave(state)


def end_of(folder: Path) -> RunEnd:
    """Return how the run in `folder` has ended, by its records; "running" if they do not say, as on other machines."""
    from stageline.workers.runs.records import RecordedState, recorded_run  # the table needs no records

    try:
        with recorded_run(folder) as run:
            known = run.owner is not None or run.outcome is not None
            state = run.state
    except (StagelineError, BrokerError, OSError):
        return RunEnd.RUNNING
    match state:
        case RecordedState.FINISHED:
            return RunEnd.FINISHED
        case RecordedState.FAILED:
            return RunEnd.FAILED
        case RecordedState.STOPPED | RecordedState.KILLED if known:
            return RunEnd.KILLED
        case _:
            return RunEnd.RUNNING


def _serve(folder: Path, address: tuple[str, int]) -> None:
    """Serve the numbers of a run until it is over or, if that cannot be known here, until Ctrl-C."""
    with ScrapeEndpoint(address) as endpoint, endpoint.serving(folder, asked_by(folder)):
        while not _is_over(folder):
            sleep(LOOK)


def _is_over(folder: Path) -> bool:
    owner = read_owner(folder)
    ended = owner is not None and owner.alive is False
    return ended or (folder / runs.RESULT).exists()


def _follow(folder: Path, every: int, take: Take = lambda line: None) -> None:
    """Print new lines until the run is over or, if that cannot be known here, until Ctrl-C."""
    tail = MetricsTail(folder)
    say(row(COLUMNS))
    while True:
        over = _is_over(folder)  # before the lines are read: none comes after them then
        for line in _chosen(tail.read(), every):
            say(row(cells(line)))
            take(line)
        if over:
            return
        sys.stdout.flush()
        sleep(LOOK)
