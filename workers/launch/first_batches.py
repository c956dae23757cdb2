"""What a run's data gave when it began, by checksums in its folder: a run that is resumed has to go on with the same.

`worker` and `broker` commands keep none, and runs of earlier versions have none: then nothing is compared.
"""

from pathlib import Path

import msgspec

from stageline.pipeline.errors import ModelRefused
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.extras.preflight.transcript import FirstBatches, Transcript, goes_on

FILE = "batches.json"


def keep_first_batches(folder: Path, made: Transcript) -> None:
    """Writes the checksums to the run's `folder`, unless it has some."""
    if not (folder / FILE).exists():
        persist_json(folder / FILE, FirstBatches(made.first, made.held_out))


def demand_same_data(folder: Path, now: Transcript) -> None:
    """Raises `ModelRefused` if the run in `folder` began with other data than a trial has found `now`."""
    try:
        begun = msgspec.json.decode((folder / FILE).read_bytes(), type=FirstBatches)
    except (OSError, msgspec.MsgspecError):  # the file is a check, and no part of the run
        return
    if difference := goes_on(begun, now):
        raise ModelRefused(difference)
