"""Texts of errors for a user, and exit codes."""

import errno

import pytest

from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.workers.cli.output import CommandFailed, message_of, suggestion


def test_an_error_of_a_command_carries_its_exit_code():
    error = CommandFailed("no such run", ExitCode.USAGE)
    assert isinstance(error, StagelineError)
    assert (message_of(error), error.exit_code) == ("no such run", 2)
    assert StagelineError("anything").exit_code == ExitCode.FAILED


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "/nope"), "cannot use /nope: No such file"),
        (OSError(errno.ENOSPC, "No space left"), "cannot write to stdout, or to the run's folder: No space left"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "No usable temporary directory found in ['/tmp']. Sockets and files of a process need one: "
            "make /tmp writable, or name a folder in TMPDIR",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
    ],
)
def test_an_error_of_the_system_names_the_file_or_the_disk(error, message):
    assert message_of(error) == message


def test_a_misspelled_word_is_corrected_and_an_unknown_one_gets_the_list():
    assert suggestion("trian", ["train", "plan"]) == "did you mean train?"
    assert suggestion("xyz", ["train", "plan"]) == "there are train, plan"
