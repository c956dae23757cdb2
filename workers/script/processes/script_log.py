"""What stageline logs in a script's process goes to a file in the run's folder: the script's output is the user's."""

from contextlib import AbstractContextManager
from pathlib import Path

import structlog

NAME = "script.log"


class ScriptLog(AbstractContextManager["ScriptLog"]):
    """Appends to `script.log` in `folder`; of no effect where the user has configured structlog."""

    def __init__(self, folder: Path) -> None:
        self._file = None
        if not structlog.is_configured():
            self._file = (folder / NAME).open("a", buffering=1)
            structlog.configure(logger_factory=structlog.WriteLoggerFactory(self._file))

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            structlog.reset_defaults()
            self._file.close()
            self._file = None
