"""`stageline schedule show --file`: the schedule that a CSV file has, for the shape that its rows tell."""

from pathlib import Path

import click

from stageline.pipeline.plan.tables import LONGEST_SCHEDULE, FileUnreadable, read_text
from stageline.pipeline.schedule import LISTED, Mode, Schedule, ScheduleRefused, make_schedule, rows_of, told_by


def from_file(file: Path, mode: Mode, first_trainable: int) -> Schedule:
    """Raises `click.UsageError` for a file that is none, and `ScheduleRefused`, which names it, for what is wrong."""
    try:
        rows = rows_of(read_text(file, LONGEST_SCHEDULE))
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    except FileUnreadable as error:
        raise click.UsageError(f"{file}: {error}") from error
    try:
        placement, microbatches = told_by(rows)
        return make_schedule(LISTED, placement, microbatches, mode=mode, rows=rows, first_trainable=first_trainable)
    except ScheduleRefused as error:
        raise ScheduleRefused(f"{file}: {error.reason}", error.reason) from error
