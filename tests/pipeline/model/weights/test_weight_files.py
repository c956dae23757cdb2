"""Paths of weights: the kinds that there may be, and the refusal of others."""

import sys
from pathlib import Path

import pytest
import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.tensor_files import INDEX, files_by_name


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("nothing.safetensors", None, "there is no such file; expected a .safetensors file"),
        ("model.onnx", b"", "a .onnx file is not read; expected"),
        ("model.safetensors", b"\x04\0\0\0", "model.safetensors cannot be read, so it may be damaged or cut off: "),
        (
            "model.pt",
            b"not a file of torch",
            "model.pt is not a whole file of torch.save, or it is of torch before 1.6: wr",
        ),
        (INDEX, b"{}", "is no index of safetensors files: KeyError"),
        (
            INDEX,
            b'{"weight_map": {"a": "../b.safetensors"}}',
            "names '../b.safetensors'; expected .safetensors files",
        ),
        (INDEX, b'{"weight_map": {"a": "b.bin"}}', "names 'b.bin'"),
    ],
)
def test_what_is_no_file_of_weights_is_refused(tmp_path: Path, name: str, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelRefused, match=told):
        files_by_name(tmp_path / name)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"the folder holds neither model.safetensors.index.json nor model.safet"):
        files_by_name(tmp_path)


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ([torch.ones(1)], "holds an object of type list, not a state dict"),
        ({"model": {"a": torch.ones(1)}, "epoch": 3}, "'model' is of type dict, not a tensor. .*state_dict.. alone"),
        (
            torch.nn.Linear(1, 1),
            r"has a torch.nn.modules.linear.Linear in it; nothing but tensors is unpickled: write it",
        ),
    ],
)
def test_a_file_of_torch_holds_a_state_dict(tmp_path: Path, saved: object, told: str) -> None:
    torch.save(saved, tmp_path / "model.pt")
    with pytest.raises(ModelRefused, match=told):
        files_by_name(tmp_path / "model.pt")


def test_what_a_pickle_calls_a_class_does_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = type("\x1b[2JGone", (), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], named.__name__, named, raising=False)
    torch.save(named(), tmp_path / "model.pt")
    with pytest.raises(ModelRefused, match=r"^model.pt has a \S*\.\\x1b\[2JGone in it; nothing but tensors is unpickl"):
        files_by_name(tmp_path / "model.pt")
