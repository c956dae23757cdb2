"""The layout of a stage of a cut model, by the unsplit model's names, as a value that crosses between processes.

cut = [2]        stage 0: 0.weight 0.bias          stage 1: 2.weight 2.bias 4.weight 4.bias
cut = [1, 4]     stage 0: 0.weight 0.bias          stage 1: 2.weight 2.bias          stage 2: 4.weight 4.bias

By these names, other stages can go on from a checkpoint of this model.
"""

from collections.abc import Mapping, Sequence

import msgspec

Form = tuple[str, tuple[int, ...]]  # dtype without "torch.", shape


class StageLayout(msgspec.Struct, frozen=True):
    """Stage number `stage`, of the layers `layers`.

    `entries` are the names of its part of the model's `state_dict`; `buffers` those that this leaves out. `modules` are
    the modules that have them. `forms` are those of its parameters. `groups` are the names of the parameters in each
    group of its optimizer, None without one. `twins`: of a name, all names in the model of the same parameter, if there
    are several.
    """

    stage: int
    layers: tuple[str, ...]
    modules: tuple[str, ...]
    entries: tuple[str, ...]
    buffers: tuple[str, ...]
    forms: Mapping[str, Form]
    groups: tuple[tuple[str, ...], ...] | None
    twins: Mapping[str, tuple[str, ...]]

    def named(self, name: str) -> tuple[str, ...]:
        """Under which names the entry `name` may be stored."""
        return (name, *(each for each in self.twins.get(name, ()) if each != name))

    def depth(self, name: str) -> int:
        """Return how many characters of `name` are a module of the stage; 0 if none is."""
        return max((len(each) for each in self.modules if name.startswith(f"{each}.")), default=0)

    def layers_of(self, names: Sequence[str]) -> list[str]:
        """The layers in which the entries `names` are, as far as their names tell."""
        within = [layer for layer in self.layers if any(name.startswith(f"{layer}.") for name in names)]
        return within or list(self.layers)
