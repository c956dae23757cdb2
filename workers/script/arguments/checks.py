"""What is wrong with a `Line`'s arguments, as far as they tell by themselves: before anything is built or started.

The objects of a plan are refused where they are loaded, in the worker's process; a script's are here already.
"""

from collections.abc import Iterator

import torch

from stageline.pipeline.errors import ModelRefused

from .kinds import a_kind, misfits, model_misfit, resume_misfit, short
from .script_plan import LineOptions

_MEMORY = "memory://"


def demand_usable(model: object, options: LineOptions, *, inline: bool, resume: object = None) -> None:
    """Raises `ModelRefused`, which names the argument, its value and what would be right."""
    if wrong := resume_misfit(resume) or model_misfit(model) or next(_complaints(options, inline=inline), None):
        raise ModelRefused(wrong)
    demand_default_device()


def demand_default_device() -> None:
    """Raises `ModelRefused` if the script has changed torch's default device: the memory for messages between stages
    would be made there too."""
    if (device := torch.get_default_device()).type != "cpu":
        raise ModelRefused(
            f"the script has changed torch's default device to {device} (torch.set_default_device, or a "
            f"with torch.device(...) around this call), where messages between stages cannot be received. Call "
            f'torch.set_default_device("cpu"), or leave that block, before the Line is made and called; its stages '
            f'compute where its argument device says, such as device="cuda"'
        )


def _complaints(options: LineOptions, *, inline: bool) -> Iterator[str]:
    yield from misfits(options)
    if options.cut is not None and options.stages is not None:
        yield (
            f"cut = {options.cut!r} and stages = {options.stages!r} are two ways to say the same: cut names the layers "
            "that stages 1, 2, ... begin with, stages is their number. Leave out one"
        )
    if "model.trainable" in options.settings:
        yield 'settings["model.trainable"]: the script needs it too. Pass trainable = [...] instead'
    if "model.accept_difference" in options.settings:
        yield 'settings["model.accept_difference"]: the script needs it too. Pass accept_difference=True instead'
    if inline and (options.taps is not None or any(key.startswith("taps.") for key in options.settings)):
        yield "taps: an inline line has no folder to store them in; leave out workers, to compute in processes"
    if "optimizer.ema_decay" in options.settings:
        yield 'settings["optimizer.ema_decay"]: the script needs it too. Pass ema_decay = ... instead'
    yield from _uncallable(options)
    if reason := _device_complaint(str(options.device)):
        yield f'device = "{options.device}": {reason}; expected one that this torch has, such as "cpu" or "cuda:0"'
    if not inline and options.settings.get("queues.url") == _MEMORY:
        yield (
            f'settings["queues.url"] = "{_MEMORY}": queues in memory do not reach from one process to another. Leave '
            'it out, or pass workers="inline" to compute in this process'
        )


def _uncallable(options: LineOptions) -> Iterator[str]:
    measure = "a function of (outputs, targets)"
    named = [
        ("loss", options.loss, measure),
        ("optimizer", options.optimizer, "a function of a stage's parameters, such as partial(SGD, lr=0.1)"),
        *((f"metrics[{index}]", each, measure) for index, each in enumerate(options.metrics)),
    ]
    if options.lr_scheduler is not None:
        named.append(("lr_scheduler", options.lr_scheduler, "a function of an optimizer"))
    for name, value, wanted in named:
        if not callable(value):
            yield f"{name} = {short(value)} is {a_kind(value)}, which cannot be called; expected {wanted}"


def _device_complaint(name: str) -> str:
    """Starts no GPU: forks could not use it any more."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return "torch knows no such device"
    match device.type:
        case "meta":
            return "its tensors have no values"
        case "cuda" if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return f"torch {torch.__version__} was built without CUDA"
        case "mps" if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} was built without MPS"
        case "xpu" if not torch.xpu._is_compiled():
            return f"torch {torch.__version__} was built without XPU"
    return ""
