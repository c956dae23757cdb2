"""`stageline probe`: linear probes on the layers of a run."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stageline.workers.cli import options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import answer, counted, say, show

if TYPE_CHECKING:  # loads torch
    from stageline.workers.extras.recording.probe import ProbeReport

_TITLES = {"accuracy": "accuracy", "r2": "R²"}


@click.command(
    cls=Command,
    examples=(
        "stageline probe runs/digits-20260131-101500-1f0c",
        "stageline probe runs/digits-20260131-101500-1f0c --layers 'encoder.layer.*' --out probes.json",
    ),
    groups={"Probe": ("--layers", "--target", "--pool", "--rows"), "Output": ("--out",)},
    codes=codes(usage="an option is wrong, or the run has no taps", failed="the taps are damaged, or cannot be probed"),
)
@options.run
@click.option("--layers", multiple=True, metavar="PATTERN", help="Probe these layers only. May be repeated.")
@click.option("--target", metavar="NAME", help="Which part of the targets to predict, if they have several.")
@click.option(
    "--pool",
    type=click.Choice(["mean", "flatten", "last"]),
    help="How to pool dimensions between rows and features. Default: mean.",
)
@click.option(
    "--rows", type=click.Choice(["training", "evaluation"]), help="Rows to use. Default: training, if any were stored."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result to this file too, as JSON."
)
@options.as_json
def probe(
    run: str,
    layers: tuple[str, ...],
    target: str | None,
    pool: str | None,
    rows: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train a linear probe on each tapped layer of RUN.

    A score shows how well a layer tells the target. RUN is the folder of a run whose plan has [taps]. Classes are told
    by logistic regression, numbers by ridge regression; scores are of samples that the probe was not trained on.
    """
    from stageline.workers.disk.atomic_file import write_json
    from stageline.workers.extras.recording.linear_probe import Pool
    from stageline.workers.extras.recording.probe import ProbeChoice
    from stageline.workers.extras.recording.probe import probe as train_probes
    from stageline.workers.extras.recording.reading import read_taps

    evaluation = None if rows is None else rows == "evaluation"
    choice = ProbeChoice(layers, target, None if pool is None else Pool(pool), evaluation)
    report = train_probes(read_taps(run), choice)
    if out is not None:
        write_json(out, report)
    options.warn(report.warnings)
    answer(report, as_json, partial(_show, report))


def _show(report: "ProbeReport") -> None:
    title = _TITLES[report.score]
    table = [
        (each.layer, each.features, f"{each.l2:g}", f"{each.score:.3f}", f"{each.baseline:.3f}")
        for each in report.layers
    ]
    show("probes", ("layer", "features", "l2", title, "baseline"), table)
    samples = "" if report.samples is None else f" of {counted(report.samples, 'sample')}"
    classes = "" if report.classes is None else f", {report.classes} classes"
    say(
        f"rows of {report.rows}{samples}: {report.train_rows} to train on, {report.test_rows} to test on{classes}; "
        f"best: layer {report.best.layer}, {title} {report.best.score:.3f}"
    )
