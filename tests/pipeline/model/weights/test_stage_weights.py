"""A stage reads its own weights from files, to the bits of the model built whole; what does not fit is refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.layered.layers import StoredNames
from support.stored_models import allocated, model, stored_segments, trained
from support.whole_models import WHOLE_MODELS, gpt2

State = Mapping[str, torch.Tensor]


def separate(state: State) -> dict[str, torch.Tensor]:
    """Without the second name of a parameter, as transformers saves it."""
    return {name: tensor for name, tensor in state.items() if name != "4.1.weight"}


def one_file(folder: Path, state: State) -> Path:
    save_file(separate(state), folder / "model.safetensors")
    return folder / "model.safetensors"


def folder_of_one_file(folder: Path, state: State) -> Path:
    return one_file(folder, state).parent


def sharded(folder: Path, state: State) -> Path:
    names = {name: f"model-0000{1 + (name > '2')}-of-00002.safetensors" for name in separate(state)}
    for shard in set(names.values()):
        save_file({name: state[name] for name in names if names[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": names}))
    return index


def folder_of_shards(folder: Path, state: State) -> Path:
    return sharded(folder, state).parent


def torch_file(folder: Path, state: State) -> Path:
    torch.save(dict(state), folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("saved", [one_file, folder_of_one_file, sharded, folder_of_shards, torch_file])
def test_a_stage_has_its_own_weights_and_the_others_take_no_memory(
    tmp_path: Path, saved: Callable[[Path, State], Path]
) -> None:
    state = trained()
    whole = model()
    whole.load_state_dict(state)
    segments = stored_segments(saved(tmp_path, state))
    assert allocated(segments) == 0
    taken = 0
    for part in segments:
        part.check()
        part.load()
        taken += part.parameters
        assert allocated(segments) == taken
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in part.weights.items())
    last = segments[-1].layers[0]
    assert last[0].weight is last[1].weight  # one parameter, as in the whole model
    assert {name for part in segments for name in part.weights} == whole.state_dict().keys()


class Positions(nn.Module):
    """As a transformer has them: not among the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(6).expand((1, -1)), persistent=False)
        self.scale = torch.linspace(0, 1, 3)
        self.weight = nn.Parameter(torch.ones(6), requires_grad=False)
        self.weight.note = "kept"


def test_what_no_file_has_is_what_the_factory_computes(tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(Positions(), nn.LSTM(3, 2))

    state = trained(make)
    save_file(state, tmp_path / "m.safetensors")
    segments = stored_segments(tmp_path / "m.safetensors", make, [1])
    for part in segments:
        part.load()
    positions, lstm = segments[0].layers[0], segments[1].layers[0]
    assert torch.equal(positions.ids, torch.arange(6).expand((1, -1)))
    assert torch.equal(positions.scale, torch.linspace(0, 1, 3))
    assert (positions.weight.requires_grad, positions.weight.note) == (False, "kept")
    whole = nn.LSTM(3, 2)
    whole.load_state_dict({name: state[f"1.{name}"] for name in whole.state_dict()})
    x = torch.randn(4, 3)
    assert torch.equal(lstm(x)[0], whole(x)[0])  # it keeps its parameters in a list, too


class LateBuffer(nn.Module):
    """Gets the tensor of its buffer in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)


def test_a_buffer_that_was_registered_as_none_gets_the_tensor_that_files_have_for_it(tmp_path: Path) -> None:
    """A model that was trained and exported could not be trained on: "1.late is not the model's"."""

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), LateBuffer(), nn.Linear(3, 3))

    save_file({**trained(make), "1.late": torch.arange(3.0)}, tmp_path / "m.safetensors")
    save_file(trained(make), tmp_path / "without.safetensors")
    first, last = stored_segments(tmp_path / "m.safetensors", make, [1])
    for part in (first, last, last):
        part.check()
        part.load()
    assert torch.equal(last.weights["1.late"], torch.arange(3.0))
    last.unload()
    last.load()
    assert torch.equal(last.weights["1.late"], torch.arange(3.0))
    without = stored_segments(tmp_path / "without.safetensors", make, [1])[1]
    without.load()
    assert "1.late" not in without.weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "layoutlm", "vit"])
def test_models_of_transformers_are_what_they_are_when_they_are_built_whole(tmp_path: Path, name: str) -> None:
    found = WHOLE_MODELS[name]
    source = found.made()
    source.save_pretrained(tmp_path, max_shard_size="10KB")
    torch.manual_seed(99)  # the values that loading has to replace
    whole = found.build()
    whole.load_state_dict(source.state_dict())
    segments = stored_segments(tmp_path, found.build, found.cuts[4][0])
    assert allocated(segments) == 0
    for part in segments:
        part.load()
    loaded = {name: tensor for part in segments for name, tensor in part.state}
    wanted = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.items())
    assert all(tensor.requires_grad == wanted[name].requires_grad for name, tensor in loaded.items())


@pytest.mark.slow
def test_embeddings_that_are_the_head_are_in_the_file_once(tmp_path: Path) -> None:
    torch.manual_seed(3)
    source = gpt2()
    source.save_pretrained(tmp_path)
    (part,) = stored_segments(tmp_path, gpt2, [])
    part.load()
    weights = part.weights
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    assert torch.equal(weights["lm_head.weight"], source.transformer.wte.weight)
    last = stored_segments(tmp_path, gpt2, ["lm_head"])[1]
    last.load()
    assert torch.equal(last.weights["lm_head.weight"], source.transformer.wte.weight)  # a copy of its own


def renamed(state: dict[str, Any]) -> None:
    state["0.wight"] = state.pop("0.weight")


def transposed(state: dict[str, Any]) -> None:
    state["0.weight"] = state["0.weight"].T.contiguous()


def halved(state: dict[str, Any]) -> None:
    state["0.bias"] = state["0.bias"].half()


def emptied(state: dict[str, Any]) -> None:
    for name in [name for name in state if name.startswith(("0", "1"))]:
        del state[name]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (renamed, r'0.weight is missing \(did you mean "0.wight"\?\); 0.wight is not the model\'s \(did you mean "0.w'),
        (transposed, r"0.weight has shape \(4, 6\) there, the model wants \(6, 4\)"),
        (
            halved,
            r"0.bias has dtype torch.float16 there, the model wants torch.float32: let the factory return model.to",
        ),
        (emptied, r"0.weight is missing; 0.bias is missing; 1.weight is missing; 1.bias is missing; and 3 more"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], None], told: str) -> None:
    state = separate(trained())
    change(state)
    save_file(state, tmp_path / "m.safetensors")
    first = stored_segments(tmp_path / "m.safetensors")[0]
    with pytest.raises(ModelRefused, match=rf'model.weights = ".*m.safetensors", for stage 0: {told}'):
        first.check()
    with pytest.raises(ModelRefused, match=told):
        first.load()


def test_two_entries_that_are_one_weight_are_refused(tmp_path: Path) -> None:
    torch.save({**trained(), "zero.bias": torch.ones(6)}, tmp_path / "m.pt")
    first = stored_segments(tmp_path / "m.pt")[0]
    assert first.stored is not None
    first = replace(first, stored=replace(first.stored, names=StoredNames(((r"^zero\.", "0."),))))
    with pytest.raises(ModelRefused, match=r"0.bias and zero.bias are both the model's 0.bias: leave one out"):
        first.check()


def test_a_shard_that_is_lacking_is_named_by_the_stages_that_need_it(tmp_path: Path) -> None:
    index = sharded(tmp_path, trained())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    first, second, _ = stored_segments(index)
    first.load()
    told = "the shard model-00002-of-00002.safetensors is not there, which has 2.weight and 1 more"
    with pytest.raises(ModelRefused, match=told):
        second.check()


def test_an_index_that_names_another_shard_is_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path, trained())
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**names, "0.bias": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(
        ModelRefused, match=r"model-00002-of-00002.safetensors has no 0.bias, which the index names there"
    ):
        stored_segments(index)[0].check()


def test_a_stage_may_read_from_a_file_of_its_own_tensors_alone(tmp_path: Path) -> None:
    state = trained()
    save_file({name: value for name, value in state.items() if name.startswith("2")}, tmp_path / "part.safetensors")
    first, second, _ = stored_segments(tmp_path / "part.safetensors")
    second.load()
    assert torch.equal(second.weights["2.weight"], state["2.weight"])
    with pytest.raises(ModelRefused, match=r"0.weight is missing"):
        first.check()


@pytest.mark.parametrize(
    ("names", "counts"), [(("4.0.weight",), 0), (("4.1.weight",), 1), (("4.0.weight", "4.1.weight"), 1)]
)
def test_of_two_names_of_a_parameter_the_last_one_counts(tmp_path: Path, names: tuple[str, ...], counts: int) -> None:
    values = [torch.full((4, 4), float(number)) for number in range(2)]
    state = {name: value for name, value in trained().items() if name not in ("4.0.weight", "4.1.weight")}
    state |= {name: values[int(name[2])] for name in names}
    torch.save(state, tmp_path / "m.pt")
    last = stored_segments(tmp_path / "m.pt")[-1]
    last.load()
    assert torch.equal(last.weights["4.0.weight"], values[counts])
