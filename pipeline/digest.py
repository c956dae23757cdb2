"""Digest of a model's weights: one SHA-256 that any script can compute, from 32 bytes per tensor.

Workers digest their own tensors (`tensor_digests`); the broker combines the digests (`weights_sha256`).
"""

import ctypes
import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the broker combines digests without torch
    from torch import Tensor

TensorDigest = tuple[str, tuple[int, ...], str]
"""dtype as torch prints it without `torch.`, shape, SHA-256 in hex of the raw little-endian bytes."""


def tensor_digests(state_dict: "Mapping[str, Tensor]") -> dict[str, TensorDigest]:
    """Return the digest of every entry of a `state_dict()`, of any dtype, shape, layout in memory and device.

    Raises `TypeError` for an entry that is not a tensor (a module's `get_extra_state`): it has no bytes to digest.
    """
    return {name: _tensor_digest(name, tensor) for name, tensor in state_dict.items()}


def weights_sha256(digests: Mapping[str, TensorDigest]) -> str:
    """Return the SHA-256 in hex over all tensors of a model, in sorted name order.

    Each tensor counts as: name in UTF-8, a zero byte, dtype, a zero byte, the shape as decimal numbers joined by
    commas, a zero byte, the 32 bytes of its own SHA-256.
    """
    whole = hashlib.sha256()
    for name in sorted(digests):
        dtype, shape, hexdigest = digests[name]
        whole.update(
            b"\0".join([name.encode(), dtype.encode(), ",".join(map(str, shape)).encode(), bytes.fromhex(hexdigest)])
        )
    return whole.hexdigest()


def differing_copies(parts: Iterable[Mapping[str, TensorDigest]], copies: Mapping[str, str]) -> str:
    """Return why the weights of `parts` cannot be those of one model, "" if they can.

    Args:
        parts: Digests of each stage's tensors, by name.
        copies: Names of parameters that several stages have a copy of, each with its name in the first of these stages.
            A copy may have the same name in both.
    """
    found: dict[str, TensorDigest] = {}
    for name, digest in chain.from_iterable(part.items() for part in parts):
        first = copies.get(name, name)
        if found.setdefault(first, digest) != digest:
            names = " and ".join(dict.fromkeys((name, first)))
            return (
                f"{names}: two stages have a copy of this parameter, and the copies have come to differ. The optimizer "
                "computes a parameter from more than its own gradients and state, or the stages are on unlike "
                "hardware. Use another optimizer, or cut so that one stage has all uses of it"
            )
    return ""


def _tensor_digest(name: str, tensor: "Tensor") -> TensorDigest:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"state_dict entry {name!r} is of type {type(tensor).__name__}, not a tensor: it has no digest")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    view = (ctypes.c_ubyte * raw.numel()).from_address(raw.data_ptr())  # no copy; `raw` keeps the memory alive
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashlib.sha256(view).hexdigest()
