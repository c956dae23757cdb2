"""Layers are fetched before they compute: the next one in a forward, and in a backward the one before the last used."""

import torch
from torch import nn

from stageline.pipeline.stage.layers.fetching import LayersAhead
from stageline.pipeline.stage.layers.file_memory import FileMemory

SIDE = 160  # of a square of float32 that is large enough for a file


class NotedFiles:
    """Memory that is of no file; notes what is fetched."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.fetched: list[int] = []

    def storage(self, size: int) -> torch.UntypedStorage:
        storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
        self.given.append(storage.data_ptr())
        return storage

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage.data_ptr() in self.given

    def fetch(self, storage: torch.UntypedStorage) -> None:
        self.fetched.append(storage.data_ptr())


def test_the_next_layer_is_fetched_in_a_forward_and_the_one_before_in_a_backward() -> None:
    files = NotedFiles()
    memory = FileMemory(files)
    layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)]
    memory.take_parameters(nn.ModuleList(layers))
    ahead = LayersAhead(layers, memory)
    places = {layer.weight.data_ptr(): place for place, layer in enumerate(layers)}
    x = torch.randn(2, SIDE)
    for place, layer in enumerate(layers):
        ahead.before(place)
        x = layer(x)
    assert [places[each] for each in files.fetched] == [1, 2, 3, 0]
    files.fetched.clear()
    x.sum().backward()
    assert [places[each] for each in files.fetched if each in places] == [1, 0]
