"""Layouts of the stages of a cut model, by the unsplit model's names, as values that cross between processes.

cut = [2]        stage 0: 0.weight 0.bias          stage 1: 2.weight 2.bias 4.weight 4.bias
cut = [1, 4]     stage 0: 0.weight 0.bias          stage 1: 2.weight 2.bias          stage 2: 4.weight 4.bias

By these names, other stages can go on from a checkpoint of this model.
"""

from collections.abc import Mapping, Sequence

import msgspec

Form = tuple[str, tuple[int, ...]]  # dtype without "torch.", shape


class StageLayout(msgspec.Struct, frozen=True):
    """The layout of a stage; all names are those of the unsplit model.

    Attributes:
        stage: Number of the stage.
        layers: Names of its layers.
        modules: Names of the modules that have its entries.
        entries: Names of the stage's part of the model's `state_dict`.
        buffers: Names of the buffers that the `state_dict` leaves out.
        forms: Dtype and shape of each parameter.
        groups: Names of the parameters in each group of the stage's optimizer; None without an optimizer.
        twins: For each name of a parameter with several names in the model, all its names.
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
        """Return the names under which the entry `name` may be stored, `name` first."""
        return (name, *(each for each in self.twins.get(name, ()) if each != name))

    def depth(self, name: str) -> int:
        """Return the length of the longest module name of the stage with which `name` begins; 0 if there is none."""
        return max((len(each) for each in self.modules if name.startswith(f"{each}.")), default=0)

    def layers_of(self, names: Sequence[str]) -> list[str]:
        """Return the layers that have the entries `names`, or all layers of the stage if the names do not tell."""
        within = [layer for layer in self.layers if any(name.startswith(f"{layer}.") for name in names)]
        return within or list(self.layers)
