"""Loop that a run with a prefix cache must equal to the bit, in plain torch.

It keeps each sample's row of what leaves the frozen layers in the first epoch, and indexes those rows in all later
ones.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from support.reference import Recipe, ReferenceResult, _alone, _optimizers, _run, _update


def train_cached(
    recipe: Recipe,
    layers: int,
    samples: Callable[[int], Tensor],
    epoch: int,
    trainable: Sequence[str],
    after_step: Callable[[int, nn.Module], object] = lambda steps, model: None,
) -> ReferenceResult:
    """The output of the first `layers` layers is kept; an epoch has `epoch` steps, and `samples` says which rows of the
    data a step has. `after_step` is called after each step with the number of steps and the model."""
    with _alone(recipe.seed):
        model = recipe.build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trainable))
        prefix, suffix = nn.Sequential(*list(model)[:layers]), nn.Sequential(*list(model)[layers:])
        optimizers, rows, losses = _optimizers(recipe, model), {}, []
        for step in range(recipe.steps):
            inputs, targets = recipe.batch(step)
            found = []
            places = zip(
                *(each.tensor_split(recipe.microbatches) for each in (inputs, targets, samples(step))), strict=True
            )
            for microbatch, (x, target, numbers) in enumerate(places):
                if not len(x):
                    continue
                place = f"{recipe.seed}/{step}/{microbatch}"
                if step < epoch:
                    output = _run(prefix, x.clone(), place)
                    rows |= {number: _row(output, at) for at, number in enumerate(numbers.tolist())}
                else:
                    output = _stacked([rows[number] for number in numbers.tolist()])
                share = len(x) / len(inputs)
                loss = recipe.loss(_run(suffix, output, place, layers), target) * share
                torch.autograd.backward(loss)
                found.append(loss.detach())
            losses.append(reduce(torch.add, found).item())
            _update(model, optimizers)
            after_step(step + 1, model)
    return ReferenceResult(model.state_dict(), losses)


def _row(output: Any, at: int) -> Any:
    if isinstance(output, Tensor):
        return output[at].clone()
    if isinstance(output, dict):
        return {key: _row(part, at) for key, part in output.items()}
    return tuple(_row(part, at) for part in output) if isinstance(output, tuple) else output


def _stacked(rows: list[Any]) -> Any:
    like = rows[0]
    if isinstance(like, Tensor):
        return torch.stack(rows)
    if isinstance(like, dict):
        return {key: _stacked([row[key] for row in rows]) for key in like}
    if isinstance(like, tuple):
        return tuple(_stacked([row[place] for row in rows]) for place in range(len(like)))
    return like
