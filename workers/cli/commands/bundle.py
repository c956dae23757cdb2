"""`stageline bundle`: one archive of a run for a bug report."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import options
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import CommandFailed, answer, say, show, size

if TYPE_CHECKING:
    from stageline.workers.cli.bundle_archive import BundleFacts


@click.command(
    cls=Command,
    examples=("stageline bundle -o report.zip", "stageline bundle runs/digits-20260131-101500-1f0c -o report.zip"),
    groups={"Archive": ("--output",)},
    codes=codes(usage="there is no such run, or FILE is there"),
)
@options.where
@click.option("-o", "--output", type=click.Path(), required=True, help="File to write, which is not there yet.")
@options.as_json
def bundle(where: str | None, output: str, as_json: bool) -> None:
    """Write an archive of a run for a bug report.

    What is in it is listed, and nothing is sent.

    It has the plan, answers of `status`, `why`, `queue ls`, `timetable` and others, versions, and ends of logs; of a
    run that goes on also the workers' stacks. It has no weights, rows, keys, passwords or values of your code's texts.
    Look at it before you send it. `stageline doctor --from FILE` reads it. WHERE is a run's folder, or a plan, whose
    newest run is meant. Default: the newest run in ./runs.
    """
    from stageline.workers.cli.bundle import asking, collect  # imports pydantic
    from stageline.workers.cli.bundle_archive import BundleFacts, write_bundle

    file, folder = Path(output), options.folder_of(where)
    if file.exists():
        raise CommandFailed(f"{file} is there already: remove it, or name another with -o", ExitCode.USAGE)
    with asking(folder) as (ask, state):
        manifest, files = collect(folder, ask, state)
    try:
        written = write_bundle(file, manifest, files)
    except FileExistsError:
        raise CommandFailed(f"{file} is there already: remove it, or name another with -o", ExitCode.USAGE) from None
    facts = BundleFacts(run=manifest.run, file=output, bytes=written, files=manifest.files, left_out=manifest.left_out)
    answer({"schema": "bundle/1", **msgspec.to_builtins(facts)}, as_json, lambda: _tell(facts))


def _tell(facts: "BundleFacts") -> None:
    show(f"bundle of run {facts.run}", ("file", "bytes", "what"), [(f.name, f.bytes, f.what) for f in facts.files])
    for each in facts.left_out:
        say(f"left out: {each}")
    say(f"{facts.file}: {size(facts.bytes)}, and not sent. `stageline doctor --from {facts.file}` reads it")
