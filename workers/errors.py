"""What goes wrong with a run that a script has started."""

from pathlib import Path

from stageline.pipeline.errors import ExitCode, StagelineError


class RunFailed(StagelineError):
    """The run did not finish. `exit_code` is that of `stageline train`; `folder` contains the logs."""

    def __init__(self, reason: str, exit_code: int, folder: Path) -> None:
        """Create the error of a run that ended for `reason`, with the folder of its logs."""
        super().__init__(f"{reason} (the logs are in {folder})")
        self.reason = reason
        self.exit_code = exit_code
        self.folder = folder


class LineClosed(StagelineError):
    """A `Line` was used after it was closed."""

    exit_code = ExitCode.USAGE
