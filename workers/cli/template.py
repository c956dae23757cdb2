"""Program of the template process: imports slow modules, then forks commands on request.

`launch/template.py` starts it with an interpreter of its own, or as a fork of a script, which has the script's model
and functions.
"""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import click
import torch

from stageline.pipeline.process import last_line, streams
from stageline.pipeline.process.signals import Signals, exit_at_once
from stageline.workers.disk.owned_folder import remove_when_left
from stageline.workers.launch.forking import fork_on_request

from .app import run, stageline

_COMMANDS = ("broker", "trial", "worker")  # that it forks
_ASKS_NO_GPU = "PYTORCH_NVML_BASED_CUDA_CHECK"
_MODULES = (  # that they import when they run
    "stageline.pipeline.plan.reader",
    "stageline.workers.extras.preflight.trial",
    "stageline.workers.process.broker_process",
    "stageline.workers.process.worker_process",
)


def import_everything() -> None:
    """Import the modules that take seconds, without starting a thread, which a fork would lack."""
    # Without it, torch could ask whether there is a GPU in a way that no process can use one after a fork.
    ours = _ASKS_NO_GPU not in os.environ
    os.environ.setdefault(_ASKS_NO_GPU, "1")
    for module in _MODULES:
        import_module(module)
    for command in _COMMANDS:
        stageline.get_command(click.Context(stageline), command)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer imports torch's compiler
    if ours:
        del os.environ[_ASKS_NO_GPU]


def end_threads_of_libraries() -> None:
    """End the threads of OpenBLAS, which numpy brings, by a fork.

    OpenBLAS has threads from its import on; it ends them before a fork, and starts them again where they are needed.
    """
    if not (forked := os.fork()):
        os._exit(0)
    os.waitpid(forked, 0)


def import_libraries(names: Sequence[str]) -> None:
    """Import modules for the user's files. One that cannot be imported is left to these, where it is an error."""
    for name in names:
        with suppress(Exception):
            import_module(name)
    end_threads_of_libraries()


def main(arguments: Sequence[str]) -> int:
    """Fork commands until `train` is gone and its processes have ended; in a forked process, run its command.

    Args:
        arguments: Three descriptors, for requests, the lifeline, and the lock of the folder for sockets; that folder.

    Returns:
        The exit code of the command.
    """
    requests, lifeline, lock = map(int, arguments[:3])
    sockets = Path(arguments[3])
    for fd in (requests, lifeline, lock):
        os.set_inheritable(fd, False)  # not for what a user's code starts
    streams.keep_open()
    last_line.install()
    import_everything()
    end_threads_of_libraries()
    command = fork_on_request(socket.socket(fileno=requests), import_libraries)
    if command is None:
        os.close(lifeline)
        remove_when_left(sockets, lock)
        os._exit(0)
    streams.lose_output()
    last_line.install()  # what a fork has of it tells of the template
    Signals(on_first=exit_at_once)
    code = run(command.arguments)
    command.finish(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
