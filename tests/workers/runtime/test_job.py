"""Jobs: plans whose model and data are loaded."""

from dataclasses import replace

import pytest
import torch

from stageline.broker.control.records import RunLength
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.evaluation import Rounds
from stageline.pipeline.model.load import load_source
from stageline.pipeline.model.object_names import OBJECTS
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.recording.skipping import leaves_out
from stageline.workers.runtime.calls import CallFeed
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.plan_calls import NO_ROUNDS
from support.small_plans import plan
from support.workspace import Workspace


def job(workspace: Workspace, *sets: str) -> Job:
    return prepare(read_plan(workspace.folder, sets=sets))


def test_a_worker_keeps_the_layers_of_its_own_stages_alone(workspace: Workspace) -> None:
    whole = job(workspace)
    alone = whole.only([1])
    assert [len(part.layers) for part in alone.segments] == [0, len(whole.segments[1].layers)]
    assert [part.names for part in alone.segments] == [part.names for part in whole.segments]
    assert alone.executor([1]).stages[1].state_dict().keys() == whole.segments[1].weight_names


def test_epochs_are_steps_of_the_data_source(workspace: Workspace) -> None:
    text = (workspace.folder / "stageline.toml").read_text()
    workspace.write("stageline.toml", text.replace("steps = 6", "epochs = 2"))
    assert job(workspace).steps == 2 * load_source(read_plan(workspace.folder)).steps_per_epoch


def test_evaluation_follows_training_if_there_are_metrics(workspace: Workspace) -> None:
    assert job(workspace).rounds == Rounds(steps=6, batches=2)
    assert not job(workspace, "model.metrics=[]").rounds.batches


def test_a_plan_may_evaluate_every_so_many_steps_or_every_epoch(workspace: Workspace) -> None:
    assert job(workspace, "evaluation.every=4").rounds == Rounds(steps=6, batches=2, every=4)
    epochs = job(workspace, "evaluation.every=epoch", "model.metrics=[]")
    assert epochs.rounds == Rounds(steps=6, batches=2, every=load_source(read_plan(workspace.folder)).steps_per_epoch)
    assert epochs.length == RunLength(6, 2, epochs.rounds.every)


def test_metrics_are_named_by_their_function_unless_two_share_the_name(workspace: Workspace) -> None:
    assert list(job(workspace).metrics) == ["accuracy"]
    both = 'model.metrics=["model.py:accuracy", "metrics.py:accuracy"]'
    workspace.write("metrics.py", "def accuracy(outputs, targets):\n    return 0.0\n")
    assert list(job(workspace, both).metrics) == ["model.py:accuracy", "metrics.py:accuracy"]


def test_every_queue_has_a_window_of_twice_what_the_schedule_has_under_way(workspace: Workspace) -> None:
    prepared = job(workspace)
    queues = dict(prepared.program.queues)
    assert queues.pop("evaluation-1").window == 2 * 3 + 2
    for name, queue in queues.items():
        most = prepared.verdict.queue_bound[name]
        assert queue.window == max(2 * most + 2, most + 3)


@pytest.mark.parametrize(("choice", "skips"), [("halt", False), ("skip", True)])
def test_bad_microbatches_are_skipped_if_the_plan_says_so(workspace: Workspace, choice: str, skips: bool) -> None:
    assert leaves_out(job(workspace, f"recovery.on_bad_microbatch={choice}")) is skips


def test_a_scripted_run_loads_no_data_and_has_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTS, "model", lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    scripted = plan(run__epochs=None, data__source="script:batches", model__factory="script:model", model__cut=[1])
    prepared = prepare(scripted)
    assert (prepared.training_steps, prepared.program.scripted, prepared.rounds) == (None, True, NO_ROUNDS)
    assert {queue.name: queue.window for queue in prepared.program.queues.values()} == {
        "forward-1": 4,
        "backward-0": 4,
        "evaluation-1": 4,
        "call-0": 16,
        "reply-0": 16,
        "call-1": 16,
        "reply-1": 16,
        "loss-1": 16,
    }
    executor = prepared.executor([0])
    assert isinstance(executor.feed, CallFeed)
    with pytest.raises(ModelRefused, match="come from a script, call by call"):
        _ = prepared.feed


@pytest.mark.parametrize(("worker", "reads"), [(0, True), (1, False), (2, True), (7, True), (None, True)])
def test_a_worker_with_neither_the_first_stage_nor_the_last_has_no_data(
    workspace: Workspace, worker: int | None, reads: bool
) -> None:
    prepared = prepare(read_plan(workspace.folder, sets=["model.cut=[1,2]"]), worker=worker)
    assert (prepared.own_feed is not None) is reads
    assert prepared.length == (RunLength(6, 2) if reads else None)


def test_without_data_and_metrics_the_plan_may_say_how_long_the_run_is(workspace: Workspace) -> None:
    sets = ["model.cut=[1,2]", "model.metrics=[]"]
    prepared = prepare(read_plan(workspace.folder, sets=sets), worker=1)
    assert (prepared.own_feed, prepared.steps, prepared.rounds) == (None, 6, Rounds(6))


def test_how_long_the_run_is_has_to_be_told_to_a_worker_without_data(workspace: Workspace) -> None:
    prepared = prepare(read_plan(workspace.folder, sets=["model.cut=[1,2]"]), worker=1)
    with pytest.raises(DataError, match="the broker did not say how many steps the run has"):
        _ = prepared.rounds
    assert replace(prepared, length=RunLength(6, 2)).rounds == Rounds(6, 2)
