"""Whether an optimizer has the settings of the one whose state it is to go on from.

`load_state_dict` of torch takes over the settings in the state, so another learning rate would be ignored.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

Group = Mapping[str, Any]  # of an optimizer's `param_groups`

_INITIAL = "initial_lr"  # what a learning rate scheduler began with
_WAY_OUT = "Give it the optimizer that it was trained with, or begin another run"


def require_same_settings(optimizer: Optimizer, saved: list[Group], *, scheduled: bool) -> None:
    """Raises `ValueError` if the groups of `optimizer`, which has not stepped, have other settings than `saved`.

    What a step may change is not compared: any setting of an optimizer that is not torch's own, or has hooks; and if it
    is `scheduled`, all but the learning rate that the scheduler began with.
    """
    if not is_torchs_own(optimizer):
        return
    for mine, theirs in zip(optimizer.param_groups, saved, strict=False):  # another number of groups is torch's to find
        if unknown := sorted(theirs.keys() - mine.keys() - {_INITIAL}):
            kind = type(optimizer).__name__
            raise ValueError(f"the optimizer is a {kind}, and that in the state has {', '.join(unknown)}. {_WAY_OUT}")
        for key in sorted(_compared(theirs, scheduled)):
            if key in mine and _plain(mine[key]) != _plain(theirs[key]):
                raise ValueError(
                    f"the optimizer's {key} is {_plain(mine[key])} here, and {_plain(theirs[key])} in the state. "
                    f"{_WAY_OUT}"
                )


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether it is of torch and has no hooks, nor all optimizers have: a step changes no settings, and each parameter
    by itself."""
    own = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    of_all = (getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post"))
    return type(optimizer).__module__.startswith("torch.optim.") and not any((*own, *of_all))


def _compared(group: Group, scheduled: bool) -> set[str]:
    return group.keys() & {_INITIAL} if scheduled else group.keys() - {"params", _INITIAL}


def _plain(value: Any) -> Any:
    match value:
        case Tensor():
            return value.tolist()
        case tuple() | list():
            return [_plain(each) for each in value]
        case _:
            return value
