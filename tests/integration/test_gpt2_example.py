"""The example of a GPT-2 whose embeddings and head are one parameter, trained from a script, and saved for others."""

import pytest
from safetensors.torch import load_file

from support.paths import EXAMPLES
from support.workspace import Workspace


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tied_gpt2_is_trained_in_three_stages_measured_and_saved_as_transformers_does(workspace: Workspace) -> None:
    run = workspace.command("script", str(EXAMPLES / "gpt2" / "train.py"), "--steps", "3", HF_HUB_OFFLINE="1")
    assert run.returncode == 0, run.stderr
    (measured,) = [line for line in run.stdout.splitlines() if line.startswith("held out: ")]
    assert 4.0 < float(measured.split()[2]) < 8.0  # what knows nothing takes 8 bits for a byte
    saved = load_file(workspace.folder / "gpt2" / "model.safetensors")
    assert "transformer.wte.weight" in saved
    assert "lm_head.weight" not in saved  # it is the embeddings
