"""Whether this process can be forked, so that the forks can compute; and whether a fork can.

Threads that a library's parallel loops have left do no harm: the thread that forks has none (see system/fork.py). What
no fork can have is a GPU that this process uses, or torch's threads for backwards on GPUs.
"""

import sys
from collections.abc import Iterable

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.model.traced.apart import has_backward_threads, initialized_accelerator

_ASKS_NO_GPU = "PYTORCH_NVML_BASED_CUDA_CHECK"
_WAY_OUT = (
    "Make the line before this process uses a GPU (in a notebook: restart the kernel first), or pass "
    'workers="inline" to compute in this process. If model and functions are in files of their own, broker= '
    '"tcp://127.0.0.1:7000" works too, with workers that `stageline worker --join` starts'
)


class CannotFork(StagelineError):
    """This process has something that its forks could not use."""


def demand_forkable() -> None:
    """Raises `CannotFork`, which says why and what can be done."""
    if reason := _obstacle():
        raise CannotFork(f"the processes of a line are forks of this one, and {reason}. {_WAY_OUT}")


def gpu_obstacle(devices: Iterable[str]) -> str:
    """In a fork: why it cannot compute on `devices`, "" if it can. torch knows, and starts no GPU for that."""
    torch = sys.modules.get("torch")
    on_gpu = [device for device in devices if device.startswith("cuda")]
    if torch is None or not on_gpu or not torch.cuda._is_in_bad_fork():
        return ""
    return (
        f"no worker can use {on_gpu[0]}: the script has asked for GPUs, as torch.cuda.is_available() does, before it "
        f"was forked. Make the line before, or set {_ASKS_NO_GPU}=1 in the script's environment, with which torch asks "
        f"in a way that forks survive"
    )


def _obstacle() -> str:
    """Why forks of this process could not compute, "" if they can."""
    if name := initialized_accelerator():
        return f"it has used torch.{name}, which a fork cannot use any more"
    if has_backward_threads():
        return "a backward has run in it on a machine with a GPU, and torch's threads for that are not in a fork"
    return ""
