"""The layers of a stage as one module, whose parameters and buffers go by the unsplit model's names outside of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.tree import Tree

from .layer import joined, parts_of, state_of, unsplit_name
from .memory import copied

Weights = Mapping[str, torch.Tensor]


class Body(torch.nn.ModuleList):
    """The layers of a stage as one module, so that `torch.func.functional_call` can run them with other weights.

    Inside the body the first layer is "0", as in every module list; these are its own names. In the unsplit model the
    layer is called `names[0]`, or is made of several modules, whose names `layer.py` knows.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], names: Sequence[str], device: torch.device) -> None:
        """Take the layers and move them to `device`.

        Args:
            layers: Layers in order.
            names: Names of the layers in the unsplit model.
            device: Device that holds the weights.
        """
        super().__init__(layers)
        self.names = tuple(names)
        self.device = device
        self.to(device)
        self._made = self._places()

    def forward(self, run: Callable[[], Tree]) -> Tree:
        """Return `run()`, which calls the layers: `functional_call` replaces weights while it runs."""
        return run()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the layers' state dicts as one, by unsplit names. The tensors are the layers' own, not copies."""
        return {joined(name, key): value for name, part in self._parts for key, value in part.state_dict().items()}

    def set_weights(self, state: Weights) -> None:
        """Load the return value of `weights`.

        Raises torch's `RuntimeError`, which names what is missing or misshapen.
        """
        for name, part in self._parts:
            part.load_state_dict(state_of(part, name, state))

    def entries_of(self, named: Weights) -> dict[str, torch.Tensor]:
        """Return tensors that stand for parameters as entries of `weights`, under each name that a parameter has there.

        Args:
            named: Tensors by the names that the parameters have in the body.
        """
        given = {id(parameter): named[name] for name, parameter in self.named_parameters() if name in named}
        return {name: given[id(variable)] for name, variable in self._variables() if id(variable) in given}

    def from_entries(self, entries: Weights) -> dict[str, torch.Tensor]:
        """Return tensors by the names that parameters have in the body: the inverse of `entries_of`."""
        given = {id(variable): entries[name] for name, variable in self._variables() if name in entries}
        return {name: given[id(parameter)] for name, parameter in self.named_parameters() if id(parameter) in given}

    def unsplit_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by their names in the unsplit model; one that has several names, by the first."""
        return self.by_unsplit_names(dict(self.named_parameters()))

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that require a gradient, by their names in the body."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def by_unsplit_names(self, named: Weights) -> dict[str, torch.Tensor]:
        """Return tensors, which `named` has by their names in the body, by their names in the unsplit model."""
        return {self._unsplit(name): tensor for name, tensor in named.items()}

    def by_own_names(self, named: Weights) -> dict[str, torch.Tensor]:
        """Return tensors, which `named` has by their names in the unsplit model, by their names in the body.

        Tensors that belong to no parameter or buffer are left out.
        """
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        return {name: named[self._unsplit(name)] for name in names if self._unsplit(name) in named}

    def unsplit_buffers(self) -> dict[str, torch.Tensor]:
        """Return the layers' own buffers, by their names in the unsplit model."""
        return self.by_unsplit_names(dict(self.named_buffers()))

    def set_buffers(self, named: Weights) -> None:
        """Set each buffer that is in `named`, by its unsplit name.

        A layer may have replaced its buffer by one of another shape, or have had none yet when it was made.
        """
        for path, module in self.named_modules():
            for key, old in module._buffers.items():
                value = named.get(self._unsplit(f"{path}.{key}"))
                if value is None:
                    continue
                if old is not None and old.shape == value.shape and old.dtype == value.dtype:
                    # Unseen by autograd, as BatchNorm writes its statistics: graphs that hold the buffer stay valid.
                    old.data.copy_(value)
                else:
                    module._buffers[key] = copied(value).to(self.device)

    def demand_as_made(self) -> None:
        """Raise `ModelRefused` if a forward has registered a parameter or a buffer, or has taken one out.

        A stage that is made again would not have it, or have it again, and could not continue from this one's state. A
        buffer that was registered as None may get a tensor, and lose it.
        """
        now = self._places()
        for name in sorted(now.keys() - self._made.keys()):
            raise ModelRefused(
                f"{self._unsplit(name)} was registered by a forward. A worker that is replaced makes the model again, "
                f"without it. Register it in __init__; a buffer whose value is not known there, as None: "
                f'self.register_buffer("{name.rpartition(".")[2]}", None)'
            )
        for name in sorted(name for name, filled in self._made.items() if filled and not now.get(name)):
            raise ModelRefused(
                f"{self._unsplit(name)} was taken out of the model, or set to None, by a forward. A worker that is "
                f"replaced makes the model again, with it. Keep it, or register it as None in __init__"
            )

    def _places(self) -> dict[str, bool]:
        """Return the places for parameters and buffers by their names in the body, each with True if it is filled."""
        return {
            f"{path}.{key}": state is not None
            for path, module in self.named_modules()
            for key, state in (*module._parameters.items(), *module._buffers.items())
        }

    @property
    def _parts(self) -> list[tuple[str, torch.nn.Module]]:
        return [part for name, layer in zip(self.names, self, strict=True) for part in parts_of(layer, name)]

    def _variables(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers themselves, by the names of `weights`."""
        for name, part in self._parts:
            yield from ((joined(name, key), each) for key, each in part.state_dict(keep_vars=True).items())

    def _unsplit(self, name: str) -> str:
        position, _, rest = name.partition(".")
        return unsplit_name(self[int(position)], self.names[int(position)], rest)


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Return a context in which `module` and all modules in it are in evaluation mode.

    At its end each is in the mode that it had, such as a BatchNorm that its user has frozen with `eval()`.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train()
        for part, training in modes:  # the outer ones first, since `train` sets the inner ones too
            if part.training is not training:
                part.train(training)
