"""A cut through which every activation and gradient travels as a message changes no bit of a plain training step."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.broker.codec.message import decode, encode
from support.payloads import message


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 6, 3, stride=2), nn.GELU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6 * 6 * 6, 5))


class Chunks(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(3, -1)


class Gated(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return functional.gelu(parts[0]) * parts[1].softmax(-1) + parts[2].exp()


def gated() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 21), Chunks(), Gated(), nn.LayerNorm(7), nn.Linear(7, 5))


def whole_step(model: nn.Sequential, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss and the parameters' gradients, without any of our code."""
    loss = model(x).square().mean()
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def cut_step(model: nn.Sequential, cut: int, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same with messages between the layers before `cut` and those from it on, there and back."""
    sent = model[:cut](x)
    received: Any = decode(encode(message(sent))).payload
    loss = model[cut:](received).square().mean()
    inputs = [received] if isinstance(received, Tensor) else list(received)
    behind = torch.autograd.grad(loss, [*inputs, *model[cut:].parameters()])
    back: list[Any] = [decode(encode(message(gradient))).payload for gradient in behind[: len(inputs)]]
    before = torch.autograd.grad(sent, list(model[:cut].parameters()), back)
    return loss, [*before, *behind[len(inputs) :]]


def same_step(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    pairs = zip([one[0], *one[1]], [other[0], *other[1]], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6])
def test_a_cut_through_a_convolutional_net_changes_no_bit(cut: int, memory_format: torch.memory_format):
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(memory_format=memory_format)
    whole, parts = (convolutions().to(memory_format=memory_format) for _ in range(2))
    assert same_step(whole_step(whole, x), cut_step(parts, cut, x))


def test_a_cut_after_a_chunk_changes_no_bit():
    x = torch.randn(9, 11, 15, generator=torch.Generator().manual_seed(1))
    assert same_step(whole_step(gated(), x), cut_step(gated(), 2, x))


def summed_gradients(model: nn.Module, parts: Iterable[Tensor]) -> list[Tensor]:
    loss = torch.stack([model(part).square().sum() for part in parts]).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("width", [5, 6, 7, 33])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_of_a_batch_that_begin_anywhere_in_it_give_the_same_gradients_when_sent(parts: int, width: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))
    views = torch.randn(10, width).tensor_split(parts)
    sent: list[Any] = [decode(encode(message(view))).payload for view in views]
    assert any(view.data_ptr() % 64 for view in views)
    assert [part.data_ptr() % 64 for part in sent] == [view.data_ptr() % 64 for view in views]
    pairs = zip(summed_gradients(model, views), summed_gradients(model, sent), strict=True)
    assert all(torch.equal(plain, ours) for plain, ours in pairs)
