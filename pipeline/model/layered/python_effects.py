"""Effects of a forward in Python, which each call has and a traced graph does not.

    if random.random() < 0.1          drawn once, when the model was traced: the graph has the one branch
    self.calls += 1                   the graph counts nothing, and computes with the number of the trace

What a few calls compute rarely shows it, so the state of Python itself is compared before and after a call.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from stageline.pipeline.stage.layers.layer import joined

_PLAIN = (bool, int, float, str)
_SHOWN = 4  # names in a text


class PythonEffects:
    """Effects that calls of a model had on Python's generators and on the plain attributes of the model's modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Begin without a call of `model`."""
        self._model = model
        self._drawn: set[str] = set()
        self._changed: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note, at the end of the context, what has changed in it."""
        generators, attributes = _generators(), _attributes(self._model)
        yield
        self._drawn |= _changed(generators, _generators())
        self._changed |= _changed(attributes, _attributes(self._model))

    @property
    def refusal(self) -> str:
        """Text of an error for a model that draws from Python's generators; "" for another."""
        if not self._drawn:
            return ""
        return (
            f"the forward of the {self._kind} draws from {' and '.join(sorted(self._drawn))}, and its graphs have what "
            f"was drawn when it was traced. Draw with torch, such as torch.rand(()), and compute with the number "
            f"instead of branching; or list the layers yourself, with stageline.Layers, which call the model's own "
            f"code (docs/guides/models.md); or train the graphs as they are, with model.accept_difference = true (in a "
            f"script, accept_difference=True)"
        )

    @property
    def warnings(self) -> Iterator[str]:
        """Texts of warnings about attributes that the model changes, and its graphs do not."""
        if names := self.changed:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield (
                f"each call of the {self._kind} changes {', '.join(names[:_SHOWN])}{more}, and its graphs compute with "
                f"the value when it was traced. If the output depends on it, register a buffer instead, and write to "
                f"it in place, or list the layers yourself, with stageline.Layers (docs/guides/models.md)"
            )

    @property
    def changed(self) -> list[str]:
        """Names of the attributes that calls have changed, such as `blocks.0.calls`."""
        return sorted(self._changed)

    @property
    def _kind(self) -> str:
        return type(self._model).__name__


def _generators() -> dict[str, object]:
    """Return the states of the generators of Python and, if it is imported, of NumPy."""
    of_numpy = getattr(sys.modules.get("numpy"), "random", None)
    found: dict[str, object] = {"Python's random": random.getstate()}
    if of_numpy is not None:
        _, numbers, *places = of_numpy.get_state()
        found["numpy.random"] = numbers.tobytes(), places
    return found


def _attributes(model: torch.nn.Module) -> dict[str, object]:
    """Return the numbers and texts among the attributes of all modules, by their names in the model."""
    return {
        joined(name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in _PLAIN
    }


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    return {name for name in before.keys() & after.keys() if before[name] != after[name]}
