"""Which tensors have memory in common: what is written to one is in the other, too."""

from collections.abc import Iterator, Mapping

import torch


def overlaps(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """The names of every two neighbours in memory, all of one device, of which the first ends after the second begins.

    Elements of both may lie by turns between each other: that counts, too.
    """
    last, reached = "", 0
    for begin, end, name in sorted(_span(tensor, name) for name, tensor in named.items() if _has_memory(tensor)):
        if begin < reached:
            yield last, name
        if end > reached:
            last, reached = name, end


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _span(tensor: torch.Tensor, name: str) -> tuple[int, int, str]:
    """The addresses of its first byte and of the one after its last."""
    begin = tensor.data_ptr()
    furthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (furthest + 1) * tensor.itemsize, name
