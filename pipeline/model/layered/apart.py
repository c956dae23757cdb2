"""Calls of functions in a fork of this process, for a backward that would be in the way of later forks here.

On a machine with a GPU, torch's first backward starts threads that forks do not have. The processes of a line are forks
of the script, which traces the model before.
"""

import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from stageline.pipeline.process.child import Fork

_TASKS = Path("/proc/self/task")
_BACKWARD = "pt_autograd"  # how the names of torch's threads for backwards begin
_ACCELERATORS = ("cuda", "xpu", "mtia")
_LONGEST = 600.0  # seconds
_BLOCK = 2**16

Texts = Sequence[str]


class Unfinished(Exception):
    """The error of a fork that ended, or took too long, without a result."""


def backward_keeps_from_forking() -> bool:
    """Return True if a first backward here might leave forks of this process unable to compute.

    Neither starts a GPU nor asks for one, which would do the same.
    """
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
    """Call `function` in a fork of this process, and return its texts. The objects of this process stay as they are.

    Raises:
        Unfinished: The fork ended without a result, or took too long.
        OSError: The fork or its pipe could not be made.
    """
    ours, theirs = os.pipe()
    try:
        try:
            process = Fork(partial(_tell, function, theirs), dies_with_parent=True)
        finally:
            os.close(theirs)
        try:
            content = _read(ours)
        except BaseException:
            process.end()
            raise
    finally:
        os.close(ours)
    status = process.wait()
    if not content:
        raise Unfinished(f"the process for it ended with status {status}")
    return [str(text) for text in json.loads(content)]


def _tell(function: Callable[[], Texts], end: int) -> int:
    content = json.dumps(list(function())).encode()
    while content:
        content = content[os.write(end, content) :]
    return 0


def _read(end: int) -> bytes:
    """Read the pipe until it is closed. Raises `Unfinished` if nothing comes for `_LONGEST`."""
    found = b""
    while select.select([end], [], [], _LONGEST)[0]:
        block = os.read(end, _BLOCK)
        if not block:
            return found
        found += block
    raise Unfinished(f"the process for it took longer than {_LONGEST:.0f} s")
