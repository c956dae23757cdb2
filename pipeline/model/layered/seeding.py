"""Seeds before the layers of a model that is called itself, as a plain loop sets them.

call        block   block@2   block@3           backward, with checkpoints: block@3, block@2, block
layer       1       2         3
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from .export import called_module, number_of_call


@contextmanager
def seeded_calls(model: torch.nn.Module, calls: Sequence[str], seed: Callable[[int], None]) -> Iterator[None]:
    """Call `seed` with the number of the layer, in the context, before each call that begins one, but for the first.

    The first layer begins with the model. The seed comes before a module's own forward pre-hooks.

    Args:
        model: The model.
        calls: Call that begins each layer.
        seed: Seeds for the layer of a number.
    """
    layers: dict[str, dict[int, int]] = {}
    for number, call in enumerate(calls):
        if number:
            layers.setdefault(called_module(call), {})[number_of_call(call)] = number
    with ExitStack() as stack:
        for name, numbers in layers.items():
            hook = _SeedOfCall(seed, numbers)
            stack.enter_context(model.get_submodule(name).register_forward_pre_hook(hook, prepend=True))
        yield


class _SeedOfCall:
    """A hook of a module that seeds for the layers that its calls begin."""

    def __init__(self, seed: Callable[[int], None], layers: Mapping[int, int]) -> None:
        self._seed, self._layers, self._calls = seed, layers, 0

    def __call__(self, *_: object) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._calls += 1
            call = self._calls
        else:
            call, self._calls = max(self._calls, 1), self._calls - 1
        if (number := self._layers.get(call)) is not None:
            self._seed(number)
