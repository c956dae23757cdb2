"""Features of a worker: they wrap computations in order, are found by name, and say what a loop waits for."""

import threading
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pkgutil import resolve_name

import pytest

from stageline.pipeline.feature import Compute
from stageline.pipeline.plan import read_plan
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.control.session import Reporter
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.runtime.job import prepare
from stageline.workers.runtime.losses import ComputeFailed
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.worker_feature import REGISTERED, WorkerFeature, awaited, explained
from support.workspace import Workspace


def test_while_it_waits_for_room_the_reports_name_what_is_to_be_written() -> None:
    progress, gate = Progress(), threading.Event()
    seen: list[str] = []

    class Watching(BackgroundWriter):
        """Looks at a report while the loop waits."""

        def has_room(self, key: object = None, timeout: float | None = 0.0) -> bool:
            if progress.writes:
                seen.append(Reporter(progress, 1, 10).report(0.0).now)
                gate.set()
                return super().has_room(key, 30)
            return super().has_room(key, 0.0)

    with closing(Watching("test", limit=1)) as writer:
        writer.submit(lambda: gate.wait(30) and None)
        writer.submit(lambda: None, "taps", 1)
        progress.waits = False
        assert awaited(partial(writer.has_room, "taps"), progress, "what was tapped is", 30)
    assert seen == ["waits until what was tapped is written"]
    assert (progress.waits, progress.writes) == (False, "")


def test_a_loop_that_finds_room_does_not_wait() -> None:
    progress = Progress()
    progress.waits = False
    with closing(BackgroundWriter("test", limit=1)) as writer:
        assert awaited(partial(writer.has_room, "taps"), progress, "what was tapped is", 30)
    assert not progress.waits


class Doubling(WorkerFeature):
    """Wraps forwards of stage 0, and says so."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.called, self.told = name, told

    @property
    def name(self) -> str:
        return self.called

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        if stage.index or kind != Kind.FORWARD:
            return compute

        def doubled(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            self.told.append(self.called)
            return compute(instruction, received)

        return doubled

    def explain(self, error: ComputeFailed, features: Sequence[WorkerFeature]) -> str:
        return f"{self.called} keeps it." if self.called == "inner" else ""


def test_features_wrap_what_a_stage_computes_the_first_outermost(workspace: Workspace) -> None:
    job = prepare(read_plan(workspace.folder, sets=["workers.0.stages=[0, 1]"]))
    executor, told = job.executor([0, 1]), list[str]()
    carry_out = executor.within([Doubling("outer", told), Doubling("inner", told)])
    sent = carry_out(job.program.instruction(0, Action(Kind.FORWARD, 0, 0)), [])
    carry_out(job.program.instruction(0, Action(Kind.FORWARD, 1, 0)), [sent])
    assert told == ["outer", "inner"]


def test_what_features_add_to_a_failure_stands_on_lines_of_its_own() -> None:
    features = [Doubling("outer", []), Doubling("inner", [])]
    assert explained(features, ComputeFailed("stage 0 failed")) == "stage 0 failed [SL203]\ninner keeps it."


@pytest.mark.parametrize("factory", REGISTERED.values(), ids=REGISTERED)
def test_each_registered_feature_can_be_found(factory: str) -> None:
    assert callable(resolve_name(factory))
