"""`stageline audit`: the information on rows and labels that a cut gives away."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import answer, counted, say, show

if TYPE_CHECKING:  # loads torch
    from stageline.workers.extras.audit.audit import AuditReport, CutAudit, Picture

_WORDS = (
    "Splitting alone is not privacy: the R² are shares of the inputs that others can compute from what crosses the "
    "cut, and an area of 1 is a label that is known. A low number says that these decoders failed, not that every "
    "one does."
)


@click.command(
    cls=Command,
    examples=(
        "stageline audit examples/digits --steps 100",
        "stageline audit examples/digits --cut 3 --cut 6 --steps 100 --defences --out audit",
    ),
    groups={
        "Cuts": ("--cut", "--steps", "--rows"),
        "Defences": ("--defences", "--noise", "--clip"),
        "Output": ("--out",),
    },
    codes=codes(ExitCode.REFUSED),
)
@options.config
@options.sets
@click.option(
    "--cut",
    "cuts",
    multiple=True,
    type=click.IntRange(min=1),
    help="Audit only the cut before this layer. May be repeated.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of training steps before the audit.",
)
@click.option(
    "--rows", type=click.IntRange(min=20), default=512, show_default=True, help="Number of rows to audit with."
)
@click.option("--defences", is_flag=True, help="Audit each cut with each defence too.")
@click.option(
    "--noise",
    type=options.Finite(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Standard deviation of added noise, as a share of that of the activations.",
)
@click.option(
    "--clip",
    type=options.Finite(min=0, min_open=True),
    default=0.5,
    show_default=True,
    help="Norm to clip rows to, as a share of the median norm.",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Write audit.json and pictures into this folder."
)
@options.as_json
def audit(
    config: str,
    sets: tuple[str, ...],
    cuts: tuple[int, ...],
    steps: int,
    rows: int,
    defences: bool,
    noise: float,
    clip: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure what the cuts of the plan CONFIG give away.

    Trains the model unsplit in this process, then tells inputs and labels from what would cross each cut, with
    --defences also behind each defence, and what that costs. Nothing of a run is read or written.
    """
    from stageline.workers.disk.atomic_file import write_file, write_json
    from stageline.workers.extras.audit import audit as audits

    plan = options.plan_of(config, sets)

    def found(cut: "CutAudit", picture: "Picture | None") -> None:
        options.tell(f"cut {cut.cut}, defence {cut.defence}: measured")
        if out is not None and picture is not None:
            write_file(out / f"cut-{cut.cut}-{cut.defence.replace(' ', '-')}.png", audits.png(picture))

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with options.user_prints_to_stderr():
        report = audits.audit(plan, audits.AuditChoice(tuple(cuts), steps, rows, defences, noise, clip), found)
    if out is not None:
        write_json(out / "audit.json", report)
    answer(report, as_json, partial(_show, report))


def _show(report: "AuditReport") -> None:
    measure = [] if report.measure is None else [report.measure]
    lossy = any((each.codec, each.codec_back) != ("lossless", "lossless") for each in report.cuts)
    crossing = ("cut", "after", "features", *(("codec", "codec back") if lossy else ()), "defence")
    told = ("dCor", "by chance", "linear R²", "conv R²", "norm", "direction")
    table = [
        (
            each.cut,
            each.layer,
            each.features,
            *((each.codec, each.codec_back) if lossy else ()),
            each.defence,
            *(f"{value:.2f}" for value in (each.dependence, each.by_chance, each.linear, each.network)),
            *("-" if value is None else f"{value:.2f}" for value in (each.by_norm, each.by_direction)),
            *([] if not measure or each.score is None else [f"{each.score:.3f}"]),
        )
        for each in report.cuts
    ]
    show("what crosses", (*crossing, *told, *measure), table)
    say(
        f"after {counted(report.steps, 'step')}; decoders learned from {report.trained} rows and were measured on "
        f"{report.tested}; norm and direction: areas under the ROC curve of labels, 0.5 is guessing"
    )
    say(_WORDS)
