"""Splits rows into those that a probe is trained on and those that it is tested on, by the samples that they are of.

sha256 of the sample's number      0 1 2 3 4 ...  modulo 5: 0 is tested, 1 chooses the penalty, the others are fitted

All rows of a sample are in one part, however often it was seen; and a sample is in the same part in every run.
"""

from hashlib import sha256

import torch
from torch import Tensor

from .linear_probe import ProbeRows

_PARTS = 5
_TESTED, _CHOSEN = 0, 1


def split_rows(samples: Tensor) -> ProbeRows:
    """`samples`: the number of each row's sample, int64 [rows]."""
    numbers, places = distinct(samples)
    part = torch.tensor([_part(number) for number in numbers], dtype=torch.int64)[places]
    tested, chosen = part == _TESTED, part == _CHOSEN
    return ProbeRows(~(tested | chosen), chosen, tested)


def distinct(values: Tensor) -> tuple[list[int], Tensor]:
    """The different ones of `values`, int64 [rows], in ascending order; and the place of each row's among them."""
    found, places = torch.unique(values, return_inverse=True)
    return found.tolist(), places


def _part(sample: int) -> int:
    return int.from_bytes(sha256(str(sample).encode()).digest()[:8], "little") % _PARTS
