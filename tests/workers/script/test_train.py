"""`train` from a script: a whole run, and one that fails."""

import pytest

from stageline import RunFailed, train
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import PlanRefused
from support import reference
from support.paths import EXAMPLES


@pytest.mark.slow
def test_a_plan_runs_from_a_script(tmp_path):
    sets = ("run.steps=6", f"run.dir={tmp_path}")
    trained = train(EXAMPLES / "mlp", *sets)
    assert trained.result.weights_sha256 == reference.reference_digest(EXAMPLES / "mlp", steps=6)
    assert reference.weights_sha256(trained.state_dict()) == trained.result.weights_sha256
    assert trained.folder.parent == tmp_path


@pytest.mark.slow
def test_a_run_that_fails_raises_the_reason_and_where_its_logs_are(tmp_path):
    plan = (EXAMPLES / "mlp" / "stageline.toml").read_text().replace("lr = 0.5", "lr = 1e30")
    for name in ("model.py", "data.py"):
        plan = plan.replace(f'"{name}', f'"{EXAMPLES}/mlp/{name}')
    plan = plan.replace("torch.nn.BCELoss", "torch.nn.MSELoss").replace("cut = [2]", "cut = [2]")
    (tmp_path / "stageline.toml").write_text(plan)
    with pytest.raises(PlanRefused):
        train(tmp_path, "run.stepps=3")
    (tmp_path / "model.py").write_text("def build():\n    raise ValueError('no such layer')\n")
    with pytest.raises(ModelRefused, match=r"ValueError: no such layer \(/.*/model\.py, line 2, in build\)"):
        train(tmp_path, 'model.factory="model.py:build"', f"run.dir={tmp_path}")
    (tmp_path / "loss.py").write_text(
        "from itertools import count\nnumbers = count()\n\n"
        "def loss(x, y):\n    return (x - y).square().mean() * (float('inf') if next(numbers) == 5 else 1.0)\n"
    )
    with pytest.raises(RunFailed, match="loss of microbatch 0 of step 5 is inf") as failed:
        train(tmp_path, 'model.loss="loss.py:loss"', "optimizer.lr=0.1", f"run.dir={tmp_path}", "run.steps=9")
    assert failed.value.exit_code == 1
    assert (failed.value.folder / "worker-1.log").exists()
