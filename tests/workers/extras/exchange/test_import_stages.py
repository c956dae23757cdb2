"""A stage's file has all that the stage needs, also what another one has too."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.tensor_files import INDEX
from stageline.pipeline.plan import Plan, read_plan
from stageline.workers.extras.exchange.export import export_stages
from stageline.workers.extras.exchange.foreign import foreign_weights, import_stages
from stageline.workers.extras.exchange.stored_weights import StoredWeights
from support import reference

TIED = Path(reference.__file__).parent / "tied"

MODEL = """
from torch import nn
from stageline import Layer, Layers

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.between = nn.Linear(3, 3)

def build():
    return Layers(Words(), [Layer("emb"), Layer("between"), Layer(("emb.weight",), lambda x, weight: x @ weight.T)])
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Of a model whose first and last stage have nothing but one parameter, by one name."""
    shutil.copytree(TIED, tmp_path / "plan")
    (tmp_path / "plan" / "words.py").write_text(MODEL)
    sets = ["model.factory=words.py:build", "model.cut=[1, 2]"]
    return read_plan(tmp_path / "plan" / "stageline.toml", sets=sets, environment={})


@pytest.mark.parametrize("exported", [False, True], ids=["imported", "exported"])
def test_a_stage_reads_the_index_and_its_own_file_alone(plan: Plan, exported: bool, tmp_path: Path) -> None:
    """The index named the last file that had an entry; the others were refused for it."""
    numbers = {
        "emb.weight": torch.arange(15.0).reshape(5, 3),
        "between.weight": torch.eye(3),
        "between.bias": torch.ones(3),
    }
    whole = tmp_path / "whole.safetensors"
    save_file(numbers, whole)
    import_stages(foreign_weights(whole), whole, plan, tmp_path / "parts")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    between = ["between.bias", "between.weight"]
    assert [sorted(load_file(file)) for file in files] == [["emb.weight"], between, ["emb.weight"]]
    if exported:
        export_stages(StoredWeights("the parts", tuple(files)), tmp_path / "again")
        shutil.rmtree(tmp_path / "parts")
        (tmp_path / "again").rename(tmp_path / "parts")
    again = foreign_weights(tmp_path / "parts").read(list(numbers))
    assert all(torch.equal(again[name], numbers[name]) for name in numbers)
    for stage in range(3):
        own = tmp_path / f"machine-{stage}"
        own.mkdir()
        for name in (INDEX, f"stage-{stage}.safetensors"):
            shutil.copy(tmp_path / "parts" / name, own)
        model = plan.model.model_copy(update={"weights": own})
        part = build_segments(plan.model_copy(update={"model": model}))[stage]
        part.check()
        part.load()
        assert all(torch.equal(value, numbers[name]) for name, value in part.weights.items())
    assert json.loads((own / INDEX).read_text())["metadata"]["total_size"] == (15 + 9 + 3) * 4
