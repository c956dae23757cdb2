"""Packages that hand a run's measurements to other programs: imported when asked for, and missed with advice."""

from importlib import import_module
from types import ModuleType

from stageline.pipeline.errors import ExitCode, StagelineError


class ExporterMissing(StagelineError):
    """Error that a package which hands measurements to another program is not installed.

    Mend: Install the extra that the message names.

    Example: --metrics needs the package prometheus_client, which is not installed, or not whole (No module named
    'prometheus_client'); install it with: pip install "stageline[metrics]"
    """

    error_code = "SL517"
    exit_code = ExitCode.USAGE


def imported(module: str, extra: str, what: str) -> ModuleType:
    """Return a module of a package that an extra installs.

    Args:
        module: Name of the module.
        extra: Extra of stageline that installs its package.
        what: What needs it, the subject of a sentence, such as "--metrics".

    Raises:
        ExporterMissing: The module cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ExporterMissing(
            f"{what} needs the package {package}, which is not installed, or not whole ({error}); install it with: "
            f'pip install "stageline[{extra}]"'
        ) from error
