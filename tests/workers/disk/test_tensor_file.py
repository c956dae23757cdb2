"""Tensors come back from disk to the bit, as they lay in memory; what cannot be stored is refused."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stageline.workers.disk import tensor_file
from stageline.workers.disk.tensor_file import Unsaveable, publish_tensors, read_tensors, write_tensors
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


def test_a_file_is_replaced_as_a_whole_or_stays_as_it_was(tmp_path):
    file = tmp_path / "made" / "all.safetensors"
    publish_tensors(file, {"x": torch.zeros(2)})
    publish_tensors(file, TENSORS)
    with pytest.raises(Unsaveable):
        publish_tensors(file, {"x": torch.eye(2).to_sparse()})
    assert read_tensors(file).keys() == TENSORS.keys()
    assert list(file.parent.iterdir()) == [file]


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


@contextmanager
def one_descriptor_left() -> Iterator[None]:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, most))
    with suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    os.close(opened.pop())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
        for descriptor in opened:
            os.close(descriptor)


def test_a_lack_of_descriptors_while_a_file_is_read_is_told_as_one(tmp_path: Path) -> None:
    """torch, which opens the file once more, tells it by a RuntimeError: it ended a run as a bug."""
    file = tmp_path / "weights.safetensors"
    write_tensors(file, {"a": torch.zeros(3)})
    with one_descriptor_left(), pytest.raises(OSError, match="Too many open files") as caught:
        read_tensors(file)
    assert caught.value.errno == errno.EMFILE


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        ('{"strides": [1, 1]}', r"a is damaged: with strides \[1, 1\], numbers of shape \[3, 2\] would lie in one p"),
        ('{"strides": [0, 1]}', "cannot be of shape"),
        ('{"strides": [-2, 1]}', "cannot be of shape"),
        ('{"strides": [1]}', "cannot be of shape"),
        ('{"strides": [1000000000000000000000, 1]}', "need more memory than there can be"),
        ('{"skew": -4}', "a is damaged: a skew of -4 bytes cannot be: it is below 64"),
        ('{"skew": 64}', "a skew of 64 bytes"),
        ('{"skew": 2}', "a skew of 2 bytes cannot be: it is below 64 and a multiple of 4"),
        ('{"complex": true, "strides": [2]}', r"a is damaged: noted are complex numbers, stored is torch.int32 of sha"),
    ],
)
def test_a_note_that_is_of_no_tensor_is_refused_by_the_name_of_its_own(note: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "noted.safetensors"
    save_file({"a": torch.zeros(3, 2, dtype=torch.int32)}, file, {"stageline": f'{{"a": {note}}}'})
    for packed in (False, True):
        with pytest.raises(ValueError, match=reason):
            read_tensors(file, packed=packed)
