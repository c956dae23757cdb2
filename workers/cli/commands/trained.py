"""Commands that take a run's weights: `predict` and `eval` compute with them, `export` writes them for another program.

`predict` and `eval` compute by the stages of the run's plan, on processes of this machine.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.signals import as_interrupts
from stageline.workers.cli import completion, options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import CommandFailed, answer, counted, say, show

if TYPE_CHECKING:
    from stageline.workers.extras.exchange.load import RunModel
    from stageline.workers.extras.exchange.stored_weights import StoredWeights
    from stageline.workers.extras.forward.forward_run import Measured
    from stageline.workers.script.arguments import Workers

_plan = click.option(
    "--plan",
    type=click.Path(),
    shell_complete=completion.plans,
    help="The plan's file or folder, with its code. Default: the run's.",
)
_batch_size = click.option("--batch-size", type=click.IntRange(min=1), help="Rows in a batch. Default: the plan's.")
_device = click.option("--device", help='Of all stages, such as "cpu". Default: those of the plan\'s workers.')
_ema = click.option("--ema", is_flag=True, help="With the averages of the weights, which optimizer.ema_decay keeps.")
_best = click.option(
    "--best",
    is_flag=True,
    help="The checkpoint of the best evaluation, which evaluation.keep_best keeps, or a script's fit(best=...).",
)
_workers = click.option(
    "--workers",
    type=click.Choice(["processes", "inline"]),
    default="processes",
    show_default=True,
    help="Run one process for each worker of the plan, or all stages in this process.",
)
FORMATS = ("safetensors", "transformers", "dcp", "stages", "onnx")
_SHARD = "5GiB"
_GROUPS = {"Checkpoint": ("--best", "--ema"), "Workers": ("--workers", "--device")}


def _computing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of all that compute with a run's weights."""
    for option in reversed((_batch_size, _workers, _device, options.step, _best, _ema, _plan)):
        command = option(command)
    return command


@click.command(
    cls=Command,
    examples=(
        "stageline predict runs/digits-20260131-101500-1f0c --input x.npy --output y.npy",
        "stageline predict runs/digits-20260131-101500-1f0c --input x.csv --output y.csv --step 120 --device cpu",
    ),
    groups={"Plan": ("--plan",), "Data": ("--input", "--output", "--batch-size"), **_GROUPS},
    codes=codes(ExitCode.REFUSED, failed="a stage failed, or weights are damaged"),
)
@options.run
@click.option("--input", "source", type=click.Path(), required=True, help="A .safetensors, .npy, .npz or .csv file.")
@click.option(
    "--output", "target", type=click.Path(), required=True, help="A .safetensors, .npy or .csv file, written whole."
)
@_computing
def predict(
    run: str,
    source: str,
    target: str,
    batch_size: int | None,
    workers: "Workers",
    device: str | None,
    step: int | None,
    best: bool,
    ema: bool,
    plan: str | None,
) -> None:
    """Write what the model of RUN returns for the rows of a file.

    The model is in evaluation mode; results stand in the order of the rows.
    """
    from stageline.workers.extras.forward.forward_run import predict_rows
    from stageline.workers.extras.forward.row_files import demand_writable, open_inputs

    demand_writable(Path(target))
    inputs = open_inputs(Path(source))
    model = _model(run, step, plan, device, best=best, ema=ema)
    with as_interrupts(), options.user_prints_to_stderr():
        left_out = predict_rows(model, inputs, Path(target), batch_size, workers, options.tell)
    for name, value in left_out.items():
        options.tell(f"the model's {name} is {value}, no tensor: it is left out")
    say(f"predictions for {counted(inputs.rows, 'row')} by {model.weights.title} are in {target}")


@click.command(
    "eval",
    cls=Command,
    examples=(
        "stageline eval runs/digits-20260131-101500-1f0c",
        "stageline eval runs/digits-20260131-101500-1f0c --best --data data.py:test --json",
    ),
    groups={"Plan": ("--plan",), "Data": ("--data", "--source", "--metrics", "--batch-size"), **_GROUPS},
    codes=codes(ExitCode.REFUSED, failed="a stage failed, or weights are damaged"),
)
@options.run
@click.option("--data", "dataset", metavar="REFERENCE", help="Use all rows of this dataset, named as in data.dataset.")
@click.option("--source", metavar="REFERENCE", help="Use the held-out rows of this source, named as in data.source.")
@click.option(
    "--metrics", metavar="REFERENCE", multiple=True, help="A metric to use in place of the plan's. May be repeated."
)
@_computing
@options.as_json
def evaluate(
    run: str,
    dataset: str | None,
    source: str | None,
    metrics: tuple[str, ...],
    batch_size: int | None,
    workers: "Workers",
    device: str | None,
    step: int | None,
    best: bool,
    ema: bool,
    plan: str | None,
    as_json: bool,
) -> None:
    """Measure loss and metrics of the model of RUN.

    The rows are those that its plan holds out, or other data. Names of files in REFERENCE, such as data.py:test, begin
    at the plan's folder.
    """
    if dataset is not None and source is not None:
        raise click.UsageError("--data and --source are two ways to say what to evaluate on: leave one out")
    from stageline.workers.extras.forward.forward_run import Wanted, evaluate_run

    model = _model(run, step, plan, device, best=best, ema=ema)
    wanted = Wanted(dataset, source, metrics or None, batch_size)
    with as_interrupts(), options.user_prints_to_stderr():
        data, measured = evaluate_run(model, wanted, workers, options.tell)
    found = {"rows": measured.rows, **_numbers(measured)}
    cells = [value if isinstance(value, int) else f"{value:.6g}" for value in found.values()]
    shown = partial(show, f"{model.weights.title}, on {data}", list(found), [cells])
    answer({"schema": "eval/1", **_facts(model, data, measured)}, as_json, shown)


def _model(run: str, step: int | None, plan: str | None, device: str | None, *, best: bool, ema: bool) -> "RunModel":
    """Load the model of a run with the user's code, which may print."""
    _demand_one(step, best=best)
    from stageline.workers.extras.exchange.load import run_model

    with options.user_prints_to_stderr():
        place = None if plan is None else Path(plan)
        model = run_model(Path(run), place=place, step=step, ema=ema, best=best, tell=options.tell)
    return model if device is None else model.on(device)


def _facts(model: "RunModel", data: str, measured: "Measured") -> dict[str, object]:
    values = {name: value if math.isfinite(value) else str(value) for name, value in _numbers(measured).items()}
    loss = values.pop("loss", None) if measured.loss is not None else None
    ema = bool(model.weights.averages)
    facts = {"run": model.run, "step": model.weights.step, "ema": ema, "data": data, "rows": measured.rows}
    return {**facts, "loss": loss, "metrics": values}


def _numbers(measured: "Measured") -> dict[str, float]:
    return {**({} if measured.loss is None else {"loss": measured.loss}), **measured.metrics}


@click.command(
    cls=Command,
    examples=(
        "stageline export runs/digits-20260131-101500-1f0c digits.safetensors --best",
        "stageline export runs/gpt2-20260131-101500-1f0c gpt2 --format transformers --config /data/gpt2",
    ),
    groups={
        "Plan": ("--plan",),
        "Checkpoint": ("--best", "--ema"),
        "Form": ("--format", "--config", "--max-shard-size", "--input"),
    },
    codes=codes(ExitCode.REFUSED, failed="weights are damaged"),
)
@options.run
@click.argument("out", type=click.Path())
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="One file; for from_pretrained, with --config; for torch.distributed.checkpoint.load; a file for each stage; "
    "the model as one file of ONNX. Default: what an OUT that ends with .safetensors or .onnx says.",
)
@options.step
@_best
@click.option("--ema", is_flag=True, help="The averages of the weights, which optimizer.ema_decay keeps.")
@click.option(
    "--config",
    type=click.Path(),
    help="For transformers: config.json, or a folder with it. Default: that of what the plan's factory returns, which "
    "other models do not have.",
)
@click.option(
    "--max-shard-size",
    "most",
    type=options.Bytes(),
    default=_SHARD,
    show_default=True,
    help="For transformers: the most that a file may have, such as 500MiB.",
)
@click.option(
    "--input",
    "source",
    type=click.Path(),
    help="For onnx: a file with rows of inputs, as for predict. Default: a batch of the plan's data.",
)
@click.option(
    "--plan",
    type=click.Path(),
    shell_complete=completion.plans,
    help="For onnx, and for transformers without --config: the plan. Default: the run's.",
)
def export(
    run: str,
    out: str,
    *,
    form: str | None,
    step: int | None,
    best: bool,
    ema: bool,
    config: str | None,
    most: int,
    source: str | None,
    plan: str | None,
) -> None:
    """Write the weights of RUN to OUT, for another program.

    OUT must not exist. The names are those of the unsplit model. RUN is the folder of a run, or of what Line.save has
    saved. Its weights are those that it ended with, or of its newest checkpoint.
    """
    form = form or _form_of(out)
    _demand_one(step, best=best)
    if form == "onnx":
        title = _export_onnx(run, Path(out), step, plan, source, best=best, ema=ema)
        say(f"the model with {title} is in {out}")
        return
    from stageline.workers.extras.exchange import export as forms
    from stageline.workers.extras.exchange.stored_weights import take_weights

    target = Path(out)

    def write(weights: "StoredWeights") -> None:
        match form:
            case "safetensors":
                forms.export_file(weights, target)
            case "stages":
                forms.export_stages(weights, target)
            case "dcp":
                forms.export_dcp(weights, target)
            case _:
                forms.export_transformers(weights, target, _configuration(Path(run), config, plan), most)

    weights = take_weights(Path(run), step, write, options.tell, ema=ema, best=best)
    say(f"{weights.title} are in {out}")


def _export_onnx(
    run: str, target: Path, step: int | None, plan: str | None, source: str | None, *, best: bool, ema: bool
) -> str:
    """Write the model of a run as ONNX, and return what its weights are called."""
    from stageline.pipeline.model.load import load_source
    from stageline.workers.extras.exchange import onnx_form
    from stageline.workers.extras.forward.row_files import open_inputs

    onnx_form.require_onnx()
    given = None if source is None else next(open_inputs(Path(source)).batches(onnx_form.LEAST))
    model = _model(run, step, plan, None, best=best, ema=ema)
    with options.user_prints_to_stderr():
        batch = load_source(model.plan).batch(0)[0] if given is None else given
        onnx_form.export_onnx(model.module, onnx_form.example_of(batch), target)
    return model.weights.title


def _demand_one(step: int | None, *, best: bool) -> None:
    if best and step is not None:
        raise click.UsageError("--step and --best name two checkpoints; give one of them")


def _form_of(out: str) -> str:
    for form in ("safetensors", "onnx"):
        if out.endswith(f".{form}"):
            return form
    raise click.UsageError(f"--format says what {out} is to be: {', '.join(FORMATS)}")


def _configuration(run: Path, config: str | None, plan: str | None) -> Mapping[str, object]:
    from stageline.workers.extras.exchange.export import read_configuration
    from stageline.workers.extras.exchange.load import planned_configuration

    if config is not None:
        return read_configuration(Path(config))
    with options.user_prints_to_stderr():
        try:
            planned = options.plan_of_run(run, plan, ())
        except CommandFailed as error:  # as for a script, whose run has no plan's file
            way_out = "or a folder with the model's config.json by --config FOLDER"
            raise CommandFailed(f"{error}, {way_out}", error.exit_code) from error
        return planned_configuration(planned)
