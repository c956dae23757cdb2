"""What of a stage lies outside its worker's memory, and when it is read ahead of its use. Nothing does, at first.

activations   in a scratch, between a forward and its backward
state         in memory of files: weights with gradients and averages, what the optimizer keeps, copies of snapshots
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from stageline.pipeline.features.offload import ActivationOffload, Scratch

from .layers.body import Body
from .layers.file_memory import FileMemory, LayersAhead
from .layers.memory import copied
from .layers.seeded_layers import SeededLayers
from .layers.stash import InputNodes, Version
from .stage_update import StageUpdate, UpdatedFiles


class OffloadedParts:
    """Those of one stage: of its `body`, which `layers` run and `update` changes."""

    def __init__(self, body: Body, layers: SeededLayers, update: StageUpdate) -> None:
        self._body, self._layers, self._update = body, layers, update
        self._activations: ActivationOffload | None = None
        self._ahead: LayersAhead | None = None
        self.files: FileMemory | None = None  # of the state

    def take_activations(self, scratch: Scratch) -> None:
        """What the forwards from now on keep for their backwards goes to `scratch`."""
        self._activations = ActivationOffload(scratch)

    def take_state(self, files: FileMemory, *, weights: bool, optimizer: bool) -> None:
        """These go to `files`, and so do the copies that snapshots are."""
        self.files = files
        if weights:
            self._take_weights(files)
        self._update.files = UpdatedFiles(files, state=optimizer)

    def saving(self, microbatch: InputNodes, version: Version) -> AbstractContextManager[None]:
        """A context for the forward of `microbatch`, with this version of the weights, which stay where they are."""
        if self._activations is None:
            return nullcontext()
        own = (*self._body.parameters(), *self._body.buffers())
        return self._activations.saving(microbatch, (*own, *version.weights.values(), *version.buffers.values()))

    def before_backward(self, microbatch: InputNodes) -> None:
        """It goes backward now: begins to read what that uses."""
        if self._activations is not None:
            self._activations.begin(microbatch)
        if self._ahead is not None:
            self._ahead.before_backward()

    def forget_microbatches(self) -> None:
        """None of those that ran forward goes backward any more."""
        if self._activations is not None:
            self._activations.clear()

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `memory.copied`; in a file, if state lies in files."""
        return copied(tensor) if self.files is None else self.files.copied(tensor)

    def _take_weights(self, files: FileMemory) -> None:
        files.take_parameters(self._body)
        self._ahead = LayersAhead([*self._body], files)
        self._layers.before = self._ahead.before_forward
        if self._update.average is not None:
            self._update.average.copied = files.copied
