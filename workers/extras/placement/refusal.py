"""Why no placement fits."""

from stageline.pipeline.errors import ExitCode, StagelineError


class NoFit(StagelineError):
    """The stages of a model have no room on the machines; the text names the constraint that stands in the way."""

    exit_code = ExitCode.REFUSED
