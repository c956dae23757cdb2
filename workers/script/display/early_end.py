"""What a script is told when its run ends before its time: where the run is, and how to go on with it."""

from pathlib import Path

from stageline.pipeline.errors import StagelineError
from stageline.workers.runs.recorded.ending import ending_of
from stageline.workers.runs.recorded.records import recorded_run

GO_ON = "go on with: "


def early_end(folder: Path, store: str) -> str:
    """Of the run in `folder`, whose broker has ended and kept its records at `store`; in the words of `stageline
    why`. Records that cannot be read leave the place alone."""
    where = f"the run is in {folder}"
    try:
        with recorded_run(folder, store) as run:
            action, complete = ending_of(run).action, run.complete
    except (StagelineError, OSError):
        return where
    begins = f". It begins at step {complete}" if complete and GO_ON in action else ""
    return f"{where}; {action}{begins}"
