"""Runs a function in a fork of this process, where a backward here would be in the way of later forks.

On a machine with a GPU, torch's first backward starts threads that forks do not have. The processes of a line are forks
of the script, which traces the model before.
"""

import gc
import json
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_BACKWARD = "pt_autograd"  # how the names of torch's threads for backwards begin
_ACCELERATORS = ("cuda", "xpu", "mtia")
_LONGEST = 600.0  # seconds
_BLOCK = 2**16

Texts = Sequence[str]


class Unfinished(Exception):
    """The fork has ended without a result."""


def backward_keeps_from_forking() -> bool:
    """Return True if a first backward here might leave forks of this process unable to compute. Neither starts a GPU
    nor asks for one, which would do the same."""
    import torch

    built = torch.backends.cuda.is_built() or torch.xpu._is_compiled()  # type: ignore[no-untyped-call]
    return built and hasattr(os, "fork") and not initialized_accelerator() and not has_backward_threads()


def initialized_accelerator() -> str:
    """Return the kind of accelerator that this process uses; "" if it uses none. Does not import torch."""
    found = ((name, getattr(sys.modules.get("torch"), name, None)) for name in _ACCELERATORS)
    return next((name for name, device in found if device is not None and device.is_initialized()), "")


def has_backward_threads() -> bool:
    """Return True if torch has its threads for backwards on accelerators; False where the system does not tell."""
    try:
        return any((task / "comm").read_text().startswith(_BACKWARD) for task in _TASKS.iterdir())
    except OSError:  # a thread has just ended, or there is no such folder
        return False


def run_apart(function: Callable[[], Texts]) -> list[str]:
    """Call `function` in a fork of this process, whose objects stay as they are. Raises `Unfinished`."""
    with suppress(OSError, ValueError):  # what is in a buffer now would be written twice
        sys.stdout.flush()
        sys.stderr.flush()
    ours, theirs = os.pipe()
    try:
        pid = _forked(function, theirs)
        try:
            content = _read(ours)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        finally:
            status = _status(pid)
    finally:
        os.close(ours)
    if not content:
        raise Unfinished(f"the process for it ended {status}")
    return [str(text) for text in json.loads(content)]


def _forked(function: Callable[[], Texts], end: int) -> int:
    """Fork in a new thread, which has no pool of threads for parallel loops: a fork would wait for those. Close `end`
    here. Raises the `OSError` of a fork that the system refuses."""
    found: list[int | OSError] = []

    def start() -> None:
        try:
            found.append(_fork(function, end))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=start, name="fork")
    thread.start()
    thread.join()
    os.close(end)
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def _status(pid: int) -> str:
    """Wait for the process and return how it ended."""
    try:
        return f"with status {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"
    except ChildProcessError:  # the system keeps no status where SIGCHLD is ignored
        return "without a result"


def _fork(function: Callable[[], Texts], end: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while there are threads, since Python 3.12
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        gc.freeze()  # what is garbage of the parent is finalized there
        content = json.dumps(list(function())).encode()
        while content:
            content = content[os.write(end, content) :]
        status = 0
    except BaseException:  # noqa: BLE001  # must not return into the code that this process was forked from
        traceback.print_exc()
    finally:
        os._exit(status)


def _read(end: int) -> bytes:
    """Read the pipe until it is closed. Raises `Unfinished` if nothing comes for `_LONGEST`."""
    found = b""
    while select.select([end], [], [], _LONGEST)[0]:
        block = os.read(end, _BLOCK)
        if not block:
            return found
        found += block
    raise Unfinished(f"the process for it took longer than {_LONGEST:.0f} s")
