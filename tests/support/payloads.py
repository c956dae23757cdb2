"""Payloads for tests of messages and queues: every dtype, many layouts, nested; and how to compare them to the bit."""

import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from stageline.broker.codec.message import Message, decode, encode
from stageline.broker.codec.tensors import DTYPES
from stageline.pipeline.stage.layers.memory import skew_of
from stageline.pipeline.tree import Tree


def message(payload: Tree, **others: Any) -> Message:
    """A message whose other fields all differ from each other."""
    fields = {
        "run": "r1",
        "queue": "forward-3",
        "number": 54,
        "incarnation": 2,
    }
    return Message(**{**fields, **others}, payload=payload)


def through(payload: Tree) -> Tree:
    """`payload`, sent and received."""
    return decode(encode(message(payload))).payload


def tensor_through(tensor: Tensor) -> Tensor:
    received = through(tensor)
    assert isinstance(received, Tensor)
    return received


def raw(tensor: Tensor) -> bytes:
    """The elements' bytes in index order."""
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def bits(tree: Tree) -> Any:
    """Equal for two trees if and only if they agree in every bit, type, stride and skew."""
    match tree:
        case Tensor():
            return tree.dtype, tuple(tree.shape), tree.stride(), skew_of(tree), tree.requires_grad, raw(tree)
        case tuple() | list():
            return type(tree), [bits(branch) for branch in tree]
        case dict():
            return dict, [(key, bits(branch)) for key, branch in tree.items()]
        case float():
            return float, tree.hex()
    return type(tree), tree


def noise(dtype: torch.dtype, shape: list[int], seed: int, skew: int = 0) -> Tensor:
    """A contiguous tensor of random bytes: NaNs of all kinds, negative zeros, subnormals; bools are 0 or 1.

    Its address modulo 64 is `skew`, a multiple of the dtype's size.
    """
    count = torch.Size(shape).numel()
    random_bytes = bytearray(bytes(skew) + random.Random(seed).randbytes(count * dtype.itemsize))
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = torch.frombuffer(random_bytes, dtype=torch.uint8).clone()
    if dtype == torch.bool:
        memory >>= 7
    return memory[skew:].view(dtype).reshape(shape)


def _permuted(tensor: Tensor, draw: Callable[..., Any]) -> Tensor:
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


def _sliced(tensor: Tensor, draw: Callable[..., Any]) -> Tensor:
    slices = st.builds(slice, st.integers(0, 2), st.integers(1, 6), st.integers(1, 3))
    return tensor[tuple(draw(st.lists(slices, max_size=tensor.dim())))]


def _expanded(tensor: Tensor, draw: Callable[..., Any]) -> Tensor:
    place = draw(st.integers(0, tensor.dim()))
    return tensor.unsqueeze(place).expand(*tensor.shape[:place], draw(st.integers(0, 3)), *tensor.shape[place:])


@st.composite
def tensors(draw: Callable[..., Any]) -> Tensor:
    """Tensors of every dtype, up to six dimensions, permuted, sliced, expanded, conjugated, anywhere in memory."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape, seed = draw(st.lists(st.integers(0, 5), max_size=4)), draw(st.integers(0, 2**32))
    tensor = noise(dtype, shape, seed, draw(st.integers(0, 64 // dtype.itemsize - 1)) * dtype.itemsize)
    for change in draw(st.lists(st.sampled_from([_permuted, _sliced, _expanded]), max_size=4)):
        tensor = change(tensor, draw)
    if dtype in (torch.complex64, torch.complex128):
        tensor = draw(st.sampled_from([tensor, tensor.conj(), tensor.conj().imag]))
        dtype = tensor.dtype
    return tensor.requires_grad_((dtype.is_floating_point or dtype.is_complex) and draw(st.booleans()))


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
trees = st.recursive(
    tensors() | scalars,
    lambda branches: (
        st.lists(branches, max_size=3)
        | st.lists(branches, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), branches, max_size=3)
    ),
    max_leaves=6,
)
