"""Tensors are read in pieces that are small whatever the tensors are."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model import tensor_files as reading
from stageline.pipeline.model.tensor_files import pieces_of, read_into, spans, values_in

TENSORS = {
    "table": torch.arange(70.0).reshape(7, 10),
    "line": torch.arange(33),
    "number": torch.tensor(4),
    "none": torch.zeros(0, 3),
    "truth": torch.tensor([True, False, True]),
    "half": torch.arange(12).to(torch.bfloat16).reshape(2, 2, 3),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("most", [1, 50, 100, 10**6])
def test_what_is_read_is_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, most: int
) -> None:
    monkeypatch.setattr(reading, "SPAN", most)
    monkeypatch.setattr(reading, "PIECE", most)
    file = tmp_path / f"m{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(TENSORS, file)
    targets = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    read_into(file, targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in TENSORS.items())


def test_a_span_has_no_more_bytes_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SPAN", 100)
    monkeypatch.setattr(reading, "PIECE", 100)
    pieces = [piece for name, tensor in TENSORS.items() for piece in pieces_of(name, tensor)]
    groups = list(spans(pieces))
    assert [piece for group in groups for piece in group] == pieces
    assert all(sum(piece.bytes for piece in group) <= 100 for group in groups)
    assert sum(piece.bytes for piece in pieces) == sum(t.numel() * t.element_size() for t in TENSORS.values())


def test_a_file_of_safetensors_that_is_cut_off_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """It was mapped, and the process was killed by SIGBUS."""
    file = tmp_path / "m.safetensors"
    save_file(TENSORS, file)

    def read() -> None:
        with values_in(file) as values:
            assert torch.equal(values("line", ...), TENSORS["line"])
            os.truncate(file, 100)
            values("table", ...)

    with pytest.raises(ModelRefused, match=r"m\.safetensors cannot be read, so .* it ends before table does"):
        read()
