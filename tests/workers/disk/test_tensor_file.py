"""Tensors come back from disk to the bit, as they lay in memory; what cannot be stored is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stageline.workers.disk import tensor_file
from stageline.workers.disk.tensor_file import Unsaveable, read_tensors, write_tensors
from support.states import alike, make_state

STATE = make_state()
TENSORS: dict[str, Tensor] = {**STATE.weights, **STATE.optimizer["state"][0]}


def test_values_strides_and_alignment_come_back(tmp_path):
    write_tensors(tmp_path / "all.safetensors", TENSORS)
    back = read_tensors(tmp_path / "all.safetensors")
    assert back.keys() == TENSORS.keys()
    assert all(alike(back[name], tensor) for name, tensor in TENSORS.items())


def test_tensors_that_share_memory_come_back_apart(tmp_path):
    block = torch.arange(6.0)
    write_tensors(tmp_path / "shared.safetensors", {"whole": block, "part": block[2:4], "same": block})
    back = read_tensors(tmp_path / "shared.safetensors")
    assert torch.equal(back["part"], block[2:4])
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 3


@pytest.mark.parametrize("odd", [torch.eye(2).to_sparse(), torch.eye(2).to_mkldnn()])
def test_a_tensor_that_cannot_be_stored_is_refused_by_name(tmp_path, odd):
    with pytest.raises(Unsaveable, match="odd is a tensor of layout"):
        write_tensors(tmp_path / "odd.safetensors", {"odd": odd})


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path):
    (tmp_path / "text").write_text("this is not one")
    with pytest.raises(ValueError, match=r"\w"):
        read_tensors(tmp_path / "text")


def test_a_disk_that_does_not_keep_what_it_is_given_is_found_out(tmp_path, monkeypatch):
    def save_badly(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
        save_file(tensors, path, metadata)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(tensor_file, "save_file", save_badly)
    with pytest.raises(OSError, match=r"differs from what was written"):
        write_tensors(tmp_path / "bad.safetensors", TENSORS)


def test_others_may_read_what_their_rights_to_the_folder_let_them(tmp_path):
    write_tensors(tmp_path / "some.safetensors", TENSORS)
    assert (tmp_path / "some.safetensors").stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o666
