"""`stageline export`: writes the weights of a run in the form of another program."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stageline.workers.cli import options
from stageline.workers.cli.display.output import say

if TYPE_CHECKING:  # they load torch
    from stageline.workers.extras.exchange.stored_weights import StoredWeights

FORMATS = ("safetensors", "transformers", "dcp", "stages")
_SHARD = "5GiB"


@click.command(epilog="Example: stageline export runs/digits-20260131-101500-1f0c digits.safetensors")
@options.run
@click.argument("out", type=click.Path())
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="One file; for from_pretrained; for torch.distributed.checkpoint.load; a file for each stage. Default: the "
    "first, for an OUT that ends with .safetensors.",
)
@options.step
@click.option("--best", is_flag=True, help="The checkpoint of the best evaluation, which evaluation.keep_best keeps.")
@click.option("--ema", is_flag=True, help="The averages of the weights, which optimizer.ema_decay keeps.")
@click.option(
    "--config",
    type=click.Path(),
    help="For transformers: config.json, or a folder with it. Default: that of what the plan's factory returns.",
)
@click.option(
    "--max-shard-size",
    "most",
    type=options.Bytes(),
    default=_SHARD,
    show_default=True,
    help="For transformers: the most that a file may have, such as 500MiB.",
)
@click.option("--plan", type=click.Path(), help="For transformers, without --config: the plan. Default: the run's.")
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
    plan: str | None,
) -> None:
    """Write the weights of RUN to OUT, which must not exist, under the unsplit model's names.

    RUN is the folder of a run, or of what Line.save has saved. Its weights are those that it ended with, or of its
    newest checkpoint.
    """
    form = form or _form_of(out)
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

    weights = take_weights(Path(run), _chosen(run, step, best=best), write, options.tell, ema=ema)
    say(f"{weights.title} are in {out}")


def _chosen(run: str, step: int | None, *, best: bool) -> int | None:
    """The step whose checkpoint is meant; None: the newest."""
    from stageline.workers.checkpoint.source import source_in

    if not best:
        return step
    if step is not None:
        raise click.UsageError("--step and --best name two checkpoints; give one of them")
    return source_in(Path(run)).best_step()


def _form_of(out: str) -> str:
    if out.endswith(".safetensors"):
        return "safetensors"
    raise click.UsageError(f"--format says what {out} is to be: {', '.join(FORMATS)}")


def _configuration(run: Path, config: str | None, plan: str | None) -> Mapping[str, object]:
    from stageline.workers.extras.exchange.configuration import planned_configuration, read_configuration

    if config is not None:
        return read_configuration(Path(config))
    with options.user_prints_to_stderr():
        return planned_configuration(options.plan_of_run(run, plan, ()))
