"""What a script is told when its run ends before its time: where the run is, and how to go on with it."""

from pathlib import Path

from stageline.pipeline.errors import StagelineError
from stageline.workers.runs.recorded.ending import ending_of
from stageline.workers.runs.recorded.records import RecordedState, recorded_run

GO_ON = "go on with: "


def early_end(folder: Path, store: str, *, knows_failure: bool = False) -> str:
    """Of the run in `folder`, whose broker has ended and kept its records at `store`; in the words of `stageline
    why`. Records that cannot be read leave the place alone. A failure is named unless the script knows it."""
    where = f"the run is in {folder}"
    try:
        with recorded_run(folder, store) as run:
            ending, complete = ending_of(run), run.complete
            failure = f"it has failed: {ending.text}; " if run.state is RecordedState.FAILED else ""
    except (StagelineError, OSError):
        return where
    begins = f". It begins at step {complete}" if complete and GO_ON in ending.action else ""
    return f"{where}; {'' if knows_failure else failure}{ending.action}{begins}"
