"""Errors of a run that a script has started."""

from pathlib import Path

from stageline.pipeline.errors import ExitCode, StagelineError


class RunFailed(StagelineError):
    """Error that a run did not finish, for a reason that has no code of its own.

    Mend: Do what the reason says, and resume with `--resume`. The run's folder has a log for each process; `stageline
    why` repeats the reason.

    Example: worker 1 was killed by SIGKILL (the logs are in runs/a)
    """

    error_code = "SL501"

    def __init__(self, reason: str, exit_code: int, folder: Path) -> None:
        """Create the error of a run that ended for `reason`, with the folder of its logs."""
        super().__init__(f"{reason} (the logs are in {folder})")
        self.reason = reason
        self.exit_code = exit_code
        self.folder = folder


class LineClosed(StagelineError):
    """Error that a `Line` was used after it was closed.

    Mend: Call it within its `with`, or make a new one.

    Example: this line is closed, as it is at the end of its `with`: its run is over. Call it before, or make a new line
    """

    error_code = "SL509"
    exit_code = ExitCode.USAGE
