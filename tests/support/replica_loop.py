"""A plain loop in plain torch over a model of which some stages have replicas: their gradients are added in groups.

A group's gradients are added up in ascending order of microbatches, each from none; then the groups', in their order.
"""

from collections.abc import Sequence
from functools import reduce

import torch

from . import reference

Groups = Sequence[Sequence[int]]  # the microbatches of each replica of a stage


def train(recipe: reference.Recipe, cut: Sequence[int], groups: Sequence[Groups]) -> reference.ReferenceResult:
    """`groups` of each stage of the model that is cut before the layers in `cut`."""
    with reference._alone(recipe.seed):
        model = reference._unsplit(recipe)
        optimizers = reference._optimizers(recipe, model)
        losses = [_step(recipe, model, cut, groups, step, optimizers) for step in range(recipe.steps)]
    return reference.ReferenceResult(model.state_dict(), losses)


def _step(recipe, model, cut, groups, step, optimizers):  # type: ignore[no-untyped-def]
    inputs, targets = recipe.batch(step)
    parts = list(zip(inputs.tensor_split(recipe.microbatches), targets.tensor_split(recipe.microbatches), strict=True))
    found, losses = [], []
    for microbatch, (x, target) in enumerate(parts):
        model.zero_grad()
        loss = recipe.loss(reference._run(model, x, f"{recipe.seed}/{step}/{microbatch}"), target)
        loss = loss * (len(x) / len(inputs))
        loss.backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
        if len(x):
            losses.append(loss.detach())
    for name, parameter in model.named_parameters():
        stage = sum(int(name.split(".")[0]) >= edge for edge in cut)
        sums = [reduce(torch.add, [found[microbatch][name] for microbatch in group]) for group in groups[stage]]
        parameter.grad = reduce(torch.add, sums)
    reference._update(model, optimizers)
    return reduce(torch.add, losses).item()
