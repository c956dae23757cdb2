"""Adapters of peft in a GPT-2, trained in stages and saved alone."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from stageline import Line, ModelRefused, load
from support.paths import EXAMPLES
from support.workspace import Workspace

FACTORY = """
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

def wrapped():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=8, n_layer=2, n_embd=8, n_head=2, use_cache=False)
    return get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

def build():
    return wrapped().get_base_model()

def loss(logits, ids):
    return cross_entropy(logits.flatten(0, 1), ids.flatten())

def accuracy(logits, ids):
    return (logits.argmax(-1) == ids).float().mean()
"""
DATA = """
import torch
from stageline import Rows

def batches(batch_size, seed):
    ids = torch.randint(16, (32, 8), generator=torch.Generator().manual_seed(1))
    return Rows(ids[:24], ids[:24], batch_size, seed, held_out=(ids[26:], ids[26:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_adapters_are_trained_saved_alone_and_predict_the_same_bits(workspace: Workspace) -> None:
    run = workspace.command("script", str(EXAMPLES / "lora" / "train.py"), "--steps", "5", HF_HUB_OFFLINE="1")
    assert run.returncode == 0, run.stderr
    *_, plain, loaded = run.stdout.splitlines()
    assert plain == "the weights of the plain loop, to the bit: True"
    assert loaded == "loaded, they predict the same bits: True"
    saved = load_file(workspace.folder / "runs" / "adapters" / "adapter_model.safetensors")
    assert saved
    assert all(".lora_" in name for name in saved)
    assert (workspace.folder / "runs" / "adapters" / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's use of transformers
def test_a_plan_trains_adapters_and_a_wrapper_takes_them_from_the_run(workspace: Workspace) -> None:
    workspace.write("model.py", FACTORY)
    workspace.write("data.py", DATA)
    sets = ("model.cut=['transformer.h.1']", "model.loss='model.py:loss'", "optimizer.lr=0.5")
    ended = workspace.command("train", ".", *(word for each in sets for word in ("--set", each)), HF_HUB_OFFLINE="1")
    assert ended.returncode == 0, ended.stderr
    (run,) = workspace.runs()
    names: dict = {}
    exec(FACTORY, names)  # noqa: S102  # our own
    wrapper = names["wrapped"]()
    before = {name: tensor.clone() for name, tensor in wrapper.state_dict().items()}
    load(run, model=wrapper.get_base_model())
    changed = {name for name, tensor in wrapper.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".lora_" in name for name in changed)
    trained = {name for name, each in wrapper.named_parameters() if each.requires_grad}
    assert trained == {name for name in before if ".lora_" in name}
    save_file({"ids": torch.arange(16).reshape(2, 8)}, workspace.folder / "x.safetensors")
    options = ("--input", "x.safetensors", "--output", "y.safetensors")
    predicted = workspace.command("predict", str(run), *options, HF_HUB_OFFLINE="1")
    assert predicted.returncode == 0, predicted.stderr
    assert load_file(workspace.folder / "y.safetensors")["output"].shape == (2, 8, 16)
    evaluated = workspace.command("eval", str(run), "--json", HF_HUB_OFFLINE="1")
    assert evaluated.returncode == 0, evaluated.stderr


def test_a_model_that_wraps_another_is_refused_with_the_way_to_that() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Sequential(torch.nn.Linear(2, 2))

        def get_base_model(self) -> torch.nn.Module:
            return self.base

    with pytest.raises(ModelRefused, match=r"of type Wrapper, of peft, which wraps .*: give its get_base_model\(\)"):
        Line(Wrapper(), stages=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, workers="inline")
