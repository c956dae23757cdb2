"""Loops that a run must equal to the bit, in plain torch, written from the documents, without any of our code.

An example's `model.py` and `data.py` are used as they are, since they belong to the user; its plan file is read with
the standard library. A change of ours that moves one bit of a result shows against these loops, not against itself.
"""

import importlib
import importlib.util
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, reduce
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True)
class Recipe:
    """Model, data and length of a training: a plan without any word on where and in which order."""

    build: Callable[[], nn.Sequential | list[nn.Module]]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    lr_scheduler: Callable[[Optimizer], LRScheduler] | None
    seed: int
    steps: int
    microbatches: int
    descending: bool = False  # adds up gradients from the last microbatch to the first


@dataclass(frozen=True)
class ReferenceResult:
    """`losses` has one entry a step, None for a step without rows."""

    state: dict[str, Tensor]
    losses: list[float | None]

    @property
    def weights_sha256(self) -> str:
        return weights_sha256(self.state)


def recipe(
    folder: Path,
    *,
    file: str = "stageline.toml",
    batch_size: int = 0,
    microbatches: int = 0,
    steps: int = 0,
    changes: Mapping[str, object] = MappingProxyType({}),
) -> Recipe:
    """Recipe of the plan file in `folder`, with other sizes where they are given, and `changes` by dotted keys."""
    plan = tomllib.loads((folder / file).read_text(encoding="utf-8"))
    for key, value in changes.items():
        *tables, name = key.split(".")
        reduce(lambda table, each: table.setdefault(each, {}), tables, plan)[name] = value
    load = partial(_load, folder)
    data, run, seed = plan["data"], plan["run"], plan["run"]["seed"]
    source = load(data["source"])(batch_size=batch_size or data["batch_size"], seed=seed, **data.get("options", {}))
    loss = load(plan["model"]["loss"])
    return Recipe(
        build=partial(load(plan["model"]["factory"]), **plan["model"].get("options", {})),
        batch=source.batch,
        loss=loss() if isinstance(loss, type) else loss,
        optimizer=_made(load, plan["optimizer"]),
        lr_scheduler=_made(load, plan["lr_scheduler"]) if "lr_scheduler" in plan else None,
        seed=seed,
        steps=steps or run.get("steps") or run["epochs"] * source.steps_per_epoch,
        microbatches=microbatches or plan["schedule"]["microbatches"],
    )


def reference_digest(folder: Path, **sizes: Any) -> str:
    """`weights_sha256` of the unsplit model in `folder` after a plain loop, with other `sizes`, as for `recipe`."""
    return train(recipe(folder, **sizes)).weights_sha256


def train(recipe: Recipe) -> ReferenceResult:
    """Trains the unsplit model, synchronously: gradients of all microbatches of a step are added up in order."""
    with _alone(recipe.seed):
        model = _unsplit(recipe)
        optimizers = _optimizers(recipe, model)
        losses = []
        for step in range(recipe.steps):
            losses.append(_accumulate(recipe, model, step))
            _update(model, optimizers)
    return ReferenceResult(model.state_dict(), losses)


def train_pipedream(recipe: Recipe, cut: Sequence[int]) -> ReferenceResult:
    """Trains the model cut before the layers in `cut`, asynchronously, with weight stashing.

    Stage r of P has P - 1 - r microbatches more in flight than the last, so the forward of microbatch n sees the
    weights after max(0, n - (P - 1 - r)) updates; its backward sees the same ones, and its gradient is applied to the
    newest (Narayanan et al., PipeDream, SOSP'19). A step is one microbatch.
    """
    with _alone(recipe.seed):
        model = _unsplit(recipe)
        layers, edges = list(model), [0, *cut, len(model)]
        stages = [
            _Stashing(recipe, nn.Sequential(*layers[low:high]), low, delay=len(cut) - index)
            for index, (low, high) in enumerate(pairwise(edges))
        ]
        losses = [_pass(recipe, stages, step) for step in range(recipe.steps)]
    return ReferenceResult(model.state_dict(), losses)


def train_delayed(recipe: Recipe) -> ReferenceResult:
    """Trains the unsplit model with a delay of one step: W(t+1) is W(t) updated with the gradients of step t at W(t-1),
    of step 0 at W(0) (Narayanan et al., PipeDream-2BW, arXiv 2006.09503, section 3.1)."""
    with _alone(recipe.seed):
        newest = _unsplit(recipe)
        optimizers = _optimizers(recipe, newest)
        before, losses = _version(newest), []
        for step in range(recipe.steps):
            read = before
            losses.append(_accumulate(recipe, read, step))
            for new, old in zip(newest.parameters(), read.parameters(), strict=True):
                new.grad, old.grad = old.grad, None
            before = _version(newest)
            _update(newest, optimizers)
    return ReferenceResult(newest.state_dict(), losses)


def weights_sha256(state: dict[str, Tensor]) -> str:
    whole = sha256()
    for name, tensor in sorted(state.items()):
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape = ",".join(str(size) for size in tensor.shape)
        whole.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{shape}\0".encode() + sha256(data).digest())
    return whole.hexdigest()


def _accumulate(recipe: Recipe, model: nn.Sequential, step: int) -> float | None:
    inputs, targets = recipe.batch(step)
    count, losses, whole = len(inputs), [], []
    slices = zip(inputs.tensor_split(recipe.microbatches), targets.tensor_split(recipe.microbatches), strict=True)
    for microbatch, (x, target) in enumerate(slices):
        if not len(x):
            continue
        loss = recipe.loss(_run(model, x, f"{recipe.seed}/{step}/{microbatch}"), target)
        loss = loss * (len(x) / count)
        whole.append(loss)
        losses.append(loss.detach())
    for loss in reversed(whole) if recipe.descending else whole:
        torch.autograd.backward(loss)
    return reduce(torch.add, losses).item() if losses else None


def _run(layers: nn.Sequential, x: Tensor, place: str, first_layer: int = 0) -> Tensor:
    for layer, module in enumerate(layers, first_layer):
        digest = sha256(f"{place}/{layer}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
        x = module(x)
    return x


class _Stashing:
    """One stage of PipeDream, with copies of its layers as they were before each of the last `delay` updates. Buffers,
    which forwards change, have no copies."""

    def __init__(self, recipe: Recipe, layers: nn.Sequential, first_layer: int, delay: int) -> None:
        self.first_layer, self._newest = first_layer, layers
        self._optimizers = _optimizers(recipe, layers)
        self._versions = deque([_version(layers)], maxlen=delay + 1)

    @property
    def seen_by_forward(self) -> nn.Sequential:
        return self._versions[0]

    def update(self) -> None:
        for new, old in zip(self._newest.parameters(), self.seen_by_forward.parameters(), strict=True):
            new.grad, old.grad = old.grad, None
        _update(self._newest, self._optimizers)
        self._versions.append(_version(self._newest))


def _version(layers: nn.Sequential) -> nn.Sequential:
    return deepcopy(layers, {id(buffer): buffer for buffer in layers.buffers()})


def _pass(recipe: Recipe, stages: list[_Stashing], step: int) -> float | None:
    x, target = recipe.batch(step)
    if not len(target):
        for stage in stages:
            stage.update()
        return None
    received, sent = [], []
    for stage in stages:
        received.append(x.detach().requires_grad_(x.requires_grad))
        x = _run(stage.seen_by_forward, received[-1], f"{recipe.seed}/{step}/0", stage.first_layer)
        sent.append(x)
    sent[-1] = recipe.loss(x, target)
    gradient = None
    for stage, given, output in zip(reversed(stages), reversed(received), reversed(sent), strict=True):
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        gradient = given.grad
        stage.update()
    return sent[-1].item()


def _unsplit(recipe: Recipe) -> nn.Sequential:
    model = recipe.build()
    return model if isinstance(model, nn.Sequential) else nn.Sequential(*model)


def _optimizers(recipe: Recipe, layers: nn.Module) -> list[Optimizer | LRScheduler]:
    """The optimizer, if there is anything to train, and the learning rate scheduler, if the recipe has one."""
    parameters = [each for each in layers.parameters() if each.requires_grad]
    if not parameters:
        return []
    optimizer = recipe.optimizer(parameters)
    return [optimizer, recipe.lr_scheduler(optimizer)] if recipe.lr_scheduler else [optimizer]


def _update(layers: nn.Module, optimizers: list[Optimizer | LRScheduler]) -> None:
    for optimizer in optimizers:
        optimizer.step()
    layers.zero_grad()


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    """One thread, as a worker has, and random numbers that begin at `seed`; both as they were, afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _made(load: Callable[[str], Any], table: dict[str, Any]) -> Callable[..., Any]:
    return partial(load(table["factory"]), **{key: value for key, value in table.items() if key != "factory"})


def _load(folder: Path, reference: str) -> Any:
    file, colon, name = reference.rpartition(":")
    if not colon:
        module, _, name = reference.rpartition(".")
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location(f"reference_{folder.name}_{Path(file).stem}", folder / file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return getattr(found, name)
