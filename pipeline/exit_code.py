"""With which code a process ends, so that whoever has started it, or supervises it, knows whose turn it is."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Those of `sysexits.h` where it has one that fits; 130 is what shells make of Ctrl-C."""

    OK = 0
    FAILED = 1  # the run, or what the command was to do
    USAGE = 2  # wrong flags
    NO_BROKER = 3  # none can be reached
    NO_WORKER = 69  # nobody is there who could do a part of the work
    SAVED = 75  # stopped, and what is done is saved: start it again to go on
    REFUSED = 78  # the plan cannot work: starting it again does not help
    INTERRUPTED = 130  # stopped, and nothing is saved
