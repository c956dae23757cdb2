"""Layers are fetched before they compute: the next one in a forward, and in a backward the one before the last used."""

import torch
from torch import nn

from stageline.pipeline.stage.layers.file_memory import FileMemory, LayersAhead

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


def test_the_next_layer_with_weights_is_fetched_in_a_forward_and_the_one_before_in_a_backward() -> None:
    files = NotedFiles()
    memory = FileMemory(files)
    layers = [nn.Linear(SIDE, SIDE, bias=False) if place != 1 else nn.Tanh() for place in range(5)]
    memory.take_parameters(nn.ModuleList(layers))
    ahead = LayersAhead(layers, memory)
    places = {layer.weight.data_ptr(): place for place, layer in enumerate(layers) if isinstance(layer, nn.Linear)}
    fetched: list[list[int]] = []
    x = torch.randn(2, SIDE)
    for place, layer in enumerate(layers):
        ahead.before_forward(place)
        fetched.append([places[each] for each in files.fetched])
        files.fetched.clear()
        x = layer(x)
    assert fetched == [[0, 2], [], [3], [4], []]
    ahead.before_backward()
    assert [places[each] for each in files.fetched] == [4, 3]
    files.fetched.clear()
    x.sum().backward()
    assert [places[each] for each in files.fetched] == [2, 0]


def test_gradients_that_more_is_added_to_are_fetched_in_a_backward_and_not_in_a_forward() -> None:
    files = NotedFiles()
    memory = FileMemory(files)
    layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(2)]
    memory.take_parameters(nn.ModuleList(layers))
    ahead = LayersAhead(layers, memory)
    nn.Sequential(*layers)(torch.randn(2, SIDE)).sum().backward()
    weights = [layer.weight.data_ptr() for layer in layers]
    gradients = [layer.weight.grad.data_ptr() for layer in layers if layer.weight.grad is not None]
    files.fetched.clear()
    ahead.before_forward(0)
    assert files.fetched == weights
    files.fetched.clear()
    ahead.before_backward()
    assert files.fetched == [weights[1], gradients[1], weights[0], gradients[0]]


def test_no_weights_are_fetched_in_a_backward_that_ends_before_them() -> None:
    files = NotedFiles()
    memory = FileMemory(files)
    layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    memory.take_parameters(nn.ModuleList(layers))
    ahead = LayersAhead(layers, memory)
    ahead.before_backward()
    nn.Sequential(*layers)(torch.randn(2, SIDE)).sum().backward()
    assert files.fetched == [layers[3].weight.data_ptr(), layers[2].weight.data_ptr()]
