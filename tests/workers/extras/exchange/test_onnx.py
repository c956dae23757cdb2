"""A run's model as ONNX: other programs compute what the model does, for any number of rows."""

import sys
from pathlib import Path

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file
from torch import Tensor, nn

from stageline import WeightsUnusable, load
from stageline.workers.extras.exchange.onnx_form import example_of, export_onnx
from support.workspace import Workspace


class TwoInputs(nn.Module):
    """Takes a dict by names, as models of transformers do, and returns trees."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, object]:
        hidden = self.embed(ids) * mask.unsqueeze(-1)
        return {"logits": self.head(hidden.sum(1)), "more": (hidden, mask)}


def computed(file: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the reference implementation of ONNX."""
    evaluator = ReferenceEvaluator(onnx.load(file))
    found = evaluator.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return {name: torch.from_numpy(value) for name, value in zip(evaluator.output_names, found, strict=True)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of packages that torch's exporter uses
def test_the_reference_of_onnx_computes_what_the_model_does_for_any_number_of_rows(workspace: Workspace) -> None:
    workspace.write(
        "model.py",
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2))\n"
        "def accuracy(outputs, targets):\n"
        "    return (outputs.argmax(1) == targets).float().mean()\n",
    )
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    (run,) = workspace.runs()
    ended = workspace.command("export", str(run), "model.onnx")
    assert ended.returncode == 0, ended.stderr
    model = load(run)
    for rows in (1, 2, 7):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            assert torch.allclose(
                computed(workspace.folder / "model.onnx", {"input": x})["output"], model(x), atol=1e-6
            )
    (given,) = onnx.load(workspace.folder / "model.onnx").graph.input
    assert [size.dim_param or size.dim_value for size in given.type.tensor_type.shape.dim] == ["rows", 4]
    again = workspace.command("export", str(run), "model.onnx")
    assert again.returncode == 2
    assert "is not overwritten" in again.stderr
    save_file({"x": torch.randn(3, 5)}, workspace.folder / "x.safetensors")
    odd = workspace.command("export", str(run), "odd.onnx", "--input", "x.safetensors")
    assert odd.returncode == 2
    assert "torch cannot export the model as ONNX for inputs float32 [2, 5]" in odd.stderr
    assert not (workspace.folder / "odd.onnx").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_inputs_and_outputs_that_are_trees_have_the_names_that_predict_has(tmp_path: Path) -> None:
    model = TwoInputs().eval()
    batch = {"ids": torch.randint(16, (5, 6)), "mask": torch.ones(5, 6)}
    export_onnx(model, example_of(batch), tmp_path / "named.onnx")
    found = computed(tmp_path / "named.onnx", batch)
    with torch.no_grad():
        wanted = model(**batch)
    assert found.keys() == {"logits", "more.0", "more.1"}
    assert torch.allclose(found["logits"], wanted["logits"], atol=1e-6)
    assert torch.equal(found["more.1"], batch["mask"])
    assert [each.name for each in tmp_path.iterdir()] == ["named.onnx"]


def test_a_package_that_is_missing_is_named_with_its_command(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert workspace.here("export", "runs/any", "model.onnx") == 2
    assert 'pip install "stageline[onnx]"' in capsys.readouterr().err


def test_an_example_of_one_row_is_refused() -> None:
    with pytest.raises(WeightsUnusable, match=r"has 1 row: torch\.export needs 2 or more"):
        example_of(torch.randn(1, 4))
