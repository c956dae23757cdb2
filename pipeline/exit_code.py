"""Exit codes, which tell the supervisor of a process whether starting it again can help."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Codes of `sysexits.h` where one fits; 130 is the shells' code for Ctrl-C."""

    OK = 0
    FAILED = 1  # the run, or the command itself
    USAGE = 2  # wrong flags
    NO_BROKER = 3  # no broker can be reached
    NO_WORKER = 69  # no worker is there for some of the stages
    SAVED = 75  # stopped with its work saved: starting it again resumes it
    REFUSED = 78  # the plan cannot work: starting it again does not help
    INTERRUPTED = 130  # stopped with nothing saved
