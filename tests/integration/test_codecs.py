"""With codecs between its stages, a run is the plain loop over the unsplit model with those codecs at its cuts."""

from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stageline import Line
from stageline.pipeline.plan import read_plan
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support import reference
from support.fork_server import ForkServer, Kill
from support.paths import EXAMPLES
from support.plain_codecs import cut_at
from support.plain_loop import PlainLoop, differing
from support.redis_server import shared_server
from support.small_models import SMALL_MODELS
from support.whole_run import TINY, WholeRun, plan_in
from support.workspace import Workspace

Codecs = tuple[tuple[int, tuple[str, str]], ...]  # the number of a layer, and the codecs at the cut before it
STEPS = 12
MIXED = "{ forward = 'int8', backward = 'bf16' }"

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def expected(folder: Path, codecs: Codecs, **sizes: Any) -> str:
    recipe = reference.recipe(folder, **sizes)

    def build() -> nn.Sequential:
        model = recipe.build()
        assert isinstance(model, nn.Sequential)
        for layer in model:
            layer.seconds = 0  # the layers that sleep
        return cut_at(model, dict(codecs))

    return reference.train(replace(recipe, build=build)).weights_sha256


def test_no_two_codecs_give_the_same_weights() -> None:
    """Or a test that compares digests would show nothing."""
    pairs = [("lossless", "lossless"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8"), ("bf16", "lossless")]
    assert len({expected(TINY, ((4, pair),)) for pair in pairs}) == len(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[[0], [1], [2], [3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]])
def test_a_queue_can_have_a_codec_of_its_own_and_the_placement_changes_nothing(
    workers: list[list[int]], tmp_path: Path
) -> None:
    """Convolutions, in-place layers and group norms; a cut within one worker loses what one between two does."""
    sets = {
        "model.cut": "[2, 5, 8]",
        "schedule.name": "interleaved-1f1b" if len(workers) == 2 else "1f1b",
        "schedule.microbatches": 5 if len(workers) != 2 else 4,
        "run.steps": 4,
        "data.batch_size": 100,
        "model.options.width": 8,
        "queues.url": "memory://",
        "queues.codec": "{ backward = 'bf16', forward = 'int8', forward-2 = 'lossless', backward-2 = 'int8' }",
        "run.dir": tmp_path,
        "workers": f"{{ {', '.join(f'{index}.stages = {stages}' for index, stages in enumerate(workers))} }}",
    }
    plan = read_plan(EXAMPLES / "digits", sets=[f"{key}={value}" for key, value in sets.items()])
    outcome = run_memory(prepare(plan), "digits-1", tmp_path / "digits-1")
    codecs = ((2, ("int8", "bf16")), (5, ("lossless", "bf16")), (8, ("int8", "int8")))
    changes = {key: value for key, value in sets.items() if key.startswith(("model.options", "data.", "run.steps"))}
    recipe = reference.recipe(EXAMPLES / "digits", changes=changes, microbatches=plan.schedule.microbatches)
    assert outcome.facts["weights_sha256"] == (
        reference.train(replace(recipe, build=lambda: cut_at(recipe.build(), dict(codecs)))).weights_sha256  # type: ignore[arg-type]
    )


KILLS: Sequence[Kill] = [("worker-0", 23), ("worker-1", 31)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "url",
    ["shm://", *(pytest.param(url, marks=pytest.mark.slow) for url in ("ipc://", "tcp://127.0.0.1:0", "redis"))],
)
def test_after_losses_of_workers_a_run_is_the_plain_loop_over_every_transport(
    url: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Messages that are put again, kept by Redis or computed again have the same bytes, or the run would end."""
    if url == "redis":
        server = shared_server()
        url = f"redis://127.0.0.1:{server.port}/{server.own_number()}"
    sets = (f"queues.codec={MIXED}", f"queues.url={url}", f"run.steps={STEPS}")
    going = WholeRun(fork_server, plan_in(tmp_path), *sets, kills=KILLS)
    assert going.digest() == expected(TINY, ((4, ("int8", "bf16")),), steps=STEPS)
    assert going.end()["facts"]["restarts"] >= 2


@pytest.mark.parametrize("workers", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_script_trains_and_predicts_through_the_codecs(workers: str, workspace: Workspace) -> None:
    """Evaluated activations go the way of those that are trained."""
    small = SMALL_MODELS["transformer"]
    codecs = dict.fromkeys(small.cut, ("int8", "bf16"))
    model = cut_at(small.build(), codecs)
    plain = PlainLoop(model, small.loss, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    plain.train(small.batch(number, 6) for number in range(3))
    given: dict[str, Any] = {"workers": workers, "folder": workspace.folder / "runs"}
    settings = {"queues.codec.forward": "int8", "queues.codec.backward": "bf16"}
    with (
        chdir(workspace.folder),
        Line(
            small.build(), cut=small.cut, loss=small.loss, optimizer=_sgd, microbatches=2, settings=settings, **given
        ) as line,
    ):
        for number in range(3):
            line.step(*small.batch(number, 6))
        x, _ = small.batch(9, 6)
        predicted = line.predict(x)
        assert not differing(line.state_dict(), plain.state())
    with torch.no_grad():
        assert torch.equal(predicted, torch.cat([model.eval()(part) for part in x.tensor_split(2)]))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
