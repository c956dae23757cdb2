"""Weights of other programs are read from files that execute nothing, and come back as they were."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from stageline.workers.extras.exchange.export import export_dcp, export_file, export_transformers, shards_of
from stageline.workers.extras.exchange.foreign import foreign_weights
from stageline.workers.extras.exchange.load import configuration_of
from stageline.workers.extras.exchange.stored_weights import StoredWeights, WeightsUnusable
from support.whole_models import WHOLE_MODELS

WEIGHTS = {
    "a.weight": torch.arange(12.0).reshape(4, 3).T.contiguous(),
    "a.count": torch.tensor(2**53 + 1),
    "b.weight": torch.linspace(-1, 1, 8).bfloat16(),
}


def alike(found: Mapping[str, Tensor]) -> bool:
    same = (torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in WEIGHTS.items())
    return found.keys() == WEIGHTS.keys() and all(same)


@pytest.fixture
def stored(tmp_path: Path) -> StoredWeights:
    """In two files."""
    names = list(WEIGHTS)
    files = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    for file, part in zip(files, (names[:2], names[2:]), strict=True):
        save_file({name: WEIGHTS[name] for name in part}, file)
    return StoredWeights("the weights", files)


def test_what_is_exported_is_imported_again_and_nothing_is_overwritten(stored: StoredWeights, tmp_path: Path) -> None:
    export_file(stored, tmp_path / "whole.safetensors")
    export_transformers(stored, tmp_path / "hub", {"model_type": "x"}, most=60)
    shards = {path.name for path in (tmp_path / "hub").iterdir()}
    assert {"config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"} <= shards
    torch.save(WEIGHTS, tmp_path / "state.pt")
    for name in ("whole.safetensors", "hub", "hub/model.safetensors.index.json", "state.pt"):
        found = foreign_weights(tmp_path / name)
        assert alike(found.read(list(WEIGHTS))), name
    with pytest.raises(WeightsUnusable, match="is there already, and is not overwritten"):
        export_file(stored, tmp_path / "whole.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert shards_of({"a": 5, "b": 5, "c": 9, "d": 1}, 10) == [["a", "b"], ["c", "d"]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_the_export_and_its_safetensors_form_is_imported(
    stored: StoredWeights, tmp_path: Path
) -> None:
    export_dcp(stored, tmp_path / "dcp")
    loaded = {name: torch.empty_like(value) for name, value in WEIGHTS.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert alike(loaded)
    with pytest.raises(WeightsUnusable, match=r"\.metadata\) is a pickle.*HuggingFaceStorageWriter"):
        foreign_weights(tmp_path / "dcp")
    dcp.save(dict(WEIGHTS), storage_writer=HuggingFaceStorageWriter(path=str(tmp_path / "hf")), no_dist=True)
    assert alike(foreign_weights(tmp_path / "hf").read(list(WEIGHTS)))


@pytest.mark.slow
def test_from_pretrained_reads_the_export_of_a_model_whose_config_is_that_of_its_factory(tmp_path: Path) -> None:
    whole = WHOLE_MODELS["gpt2 tied"]
    model = whole.made().eval()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "one.safetensors")
    stored = StoredWeights("gpt2", (tmp_path / "one.safetensors",))
    export_transformers(stored, tmp_path / "hub", configuration_of(model, "the factory"), most=20_000)
    assert len(list((tmp_path / "hub").glob("model-*.safetensors"))) > 1
    loaded = type(model).from_pretrained(tmp_path / "hub").eval()
    (inputs, _), *_ = whole.batches(1)
    with torch.no_grad():
        assert torch.equal(loaded(inputs).logits, model(inputs).logits)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "gone.safetensors"}}',
            "names gone.safetensors",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../x.safetensors"}}', "files beside it"),
        ("model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00no header at all", "cannot be read"),
        ("model.pt", b"\x80\x04cposix\nsystem\n.", "model.pt is not a whole file of torch.save"),
        ("notes.txt", b"", "a .txt file is not read"),
    ],
)
def test_what_cannot_be_used_is_named(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsUnusable, match=reason):
        _ = foreign_weights(tmp_path / name).forms


def test_a_name_that_two_files_have_is_refused_unless_they_are_equal(tmp_path: Path) -> None:
    """As stages have a parameter that they share."""
    for name, value in (("one", 0.0), ("two", float("nan"))):
        save_file({"a": torch.full((1,), value), name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsUnusable, match=r"a is in .*one\.safetensors and in .*two\.safetensors, and differs"):
        foreign_weights(tmp_path)
    save_file({"a": torch.full((1,), float("nan")), "one": torch.zeros(2)}, tmp_path / "one.safetensors")
    export_file(foreign_weights(tmp_path), tmp_path / "whole")
    assert load_file(tmp_path / "whole").keys() == {"a", "one", "two"}


def test_how_tensors_of_others_lay_is_not_asked_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """Strides of two thousand million took as many times four bytes, for six numbers."""
    file = tmp_path / "model.safetensors"
    numbers = torch.arange(6.0).reshape(3, 2)
    save_file({"a": numbers}, file, {"stageline": '{"a": {"strides": [2000000000, 1], "skew": 4}}'})
    found = foreign_weights(file).read(["a"])["a"]
    assert torch.equal(found, numbers)
    assert found.untyped_storage().nbytes() == numbers.nbytes
    save_file({"a": numbers}, file, {"stageline": '{"a": {"strides": [1, 1]}}'})
    with pytest.raises(WeightsUnusable, match=r"model.safetensors cannot be read: a is damaged: with strides \[1, 1\]"):
        foreign_weights(file).read(["a"])
