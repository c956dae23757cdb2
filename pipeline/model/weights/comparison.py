"""Compares a file's tensors with those that a stage needs: what is missing, too many, or of another shape or dtype."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from stageline.pipeline.plan.keys.key_types import nearest

from .tensor_files import Form

SHOWN = 4  # faults in one error
Twins = Mapping[str, Sequence[str]]  # of a name, in the model's order, all that are one parameter; those alone


def sources(wanted: Collection[str], stored: Collection[str], twins: Twins) -> dict[str, str]:
    """By the names that a stage wants, the names under which they are stored. Of names that are one parameter, the last
    counts: a state dict that has all is loaded in that order."""
    candidates = {name: [each for each in twins.get(name, (name,)) if each in stored] for name in wanted}
    return {name: found[-1] for name, found in candidates.items() if found}


def misnamed(wanted: Collection[str], stored: Collection[str], twins: Twins, known: Collection[str]) -> Iterator[str]:
    """What is wrong with the names in a file. `known` are those of all stages."""
    located = sources(wanted, stored, twins)
    absent = [name for name in wanted if name not in located]
    strange = [name for name in stored if name not in known]
    for number, name in enumerate(absent):
        yield f"{name} is missing{_hint(name, strange, number)}"
    for number, name in enumerate(strange, len(absent)):
        yield f"{name} is not the model's{_hint(name, absent, number)}"


def misformed(wanted: Mapping[str, torch.Tensor], forms: Mapping[str, Form]) -> Iterator[str]:
    """What is wrong with shapes and dtypes; `forms` are by the names of `wanted`."""
    for name, tensor in wanted.items():
        shape, dtype = forms[name]
        if shape != tuple(tensor.shape):
            yield f"{name} has shape {shape} there, the model wants {tuple(tensor.shape)}"
        elif dtype != tensor.dtype:
            yield (
                f"{name} has dtype {dtype} there, the model wants {tensor.dtype}: let the factory return "
                f"model.to({dtype}), or save the weights with {tensor.dtype}"
            )


def listed(faults: Sequence[str]) -> str:
    """The first faults, and how many more there are."""
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more


def _hint(name: str, names: Collection[str], number: int) -> str:
    """Of a fault that is shown; to look for all would take long."""
    near = nearest(name, names) if number < SHOWN else ""
    return f" ({near})" if near else ""
