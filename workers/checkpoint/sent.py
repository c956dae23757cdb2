"""Snapshots that workers on other machines send to their script, which saves them in a folder of its own.

A script's call to save brings a path to workers of its machine, and an empty one to others. Those reply with the state
of each stage, in which nothing depends on the time: a replacement gives the same reply.

    {"stage": 1, "weights": {...}, "averages": {...}, "tensors": {...}, "training": JSON that names the tensors}
    {"stage": 1, "lacks": "the state of a feature cannot be stored: ..."}
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.tree import Tree, describe
from stageline.workers.disk.tensor_file import BadStateTree, Json, Unsaveable, decode_state, encode_state

from .directory import SnapshotDirectory, SnapshotFailed
from .saved import NotSaved
from .snapshot import Snapshot, state_of, training_of


def sent_stages(stages: Mapping[int, Stage]) -> Tree:
    """Return the reply of a worker to a call to save: the state of each of its stages. They are copies.

    Args:
        stages: Stages of the worker, by their copies' numbers.
    """
    return tuple(_sent(copy, stage.snapshot()) for copy, stage in stages.items())


def _sent(copy: int, state: StageState) -> Tree:
    tensors: dict[str, Tensor] = {}
    try:
        training = {name: encode_state(value, name, tensors) for name, value in training_of(state).items()}
    except Unsaveable as error:  # the run need not fail for it
        return {"stage": copy, "lacks": str(error)}
    return {
        "stage": copy,
        "weights": {**state.weights},
        "averages": {**state.averages},
        "tensors": {**tensors},
        "training": msgspec.json.encode(training).decode(),
    }


def write_sent(draft: Path, plan: Plan, run: str, step: int, replies: Mapping[int, Tree]) -> None:
    """Write the snapshots that workers have sent into the draft of a checkpoint's folder.

    Args:
        draft: Draft of the folder.
        plan: Plan of the run.
        run: Id of the run.
        step: Number of steps done.
        replies: Reply of each worker, by its place.

    Raises:
        NotSaved: A reply is malformed, or of another worker's stages, or the disk does not take the snapshots.
    """
    directory = SnapshotDirectory.of(draft, run, plan)
    for worker, reply in replies.items():
        found = dict(_received(worker, reply))
        if found.keys() != {*plan.placement[worker]}:
            raise NotSaved(f"worker {worker} sent the state of stages {[*found]}, not of {[*plan.placement[worker]]}")
        for copy, state in found.items():
            try:
                directory.write(Snapshot(copy, step, 0, state))
            except SnapshotFailed as error:
                raise NotSaved(str(error)) from error


def _received(worker: int, reply: Tree) -> Iterator[tuple[int, StageState]]:
    for each in reply if isinstance(reply, tuple | list) else [reply]:
        match each:
            case {"stage": int(copy), "lacks": str(reason)}:
                raise NotSaved(f"worker {worker} could not send the state of stage {copy}: {reason}")
            case {"stage": int(copy), "training": str(training), **parts}:
                try:
                    yield copy, _state(training, **{str(name): _tensors(part) for name, part in parts.items()})
                except (ValueError, TypeError, RecursionError, BadStateTree) as error:
                    raise NotSaved(f"worker {worker} sent a state that cannot be read: {error}") from error
            case _:
                raise NotSaved(f"worker {worker} sent {describe(each)} in place of its stages' state")


def _state(
    training: str, *, weights: Mapping[str, Tensor], averages: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> StageState:
    encoded = msgspec.json.decode(training, type=dict[str, Json])
    return state_of(weights, averages, {name: decode_state(value, tensors) for name, value in encoded.items()})


def _tensors(part: object) -> Mapping[str, Tensor]:
    if not isinstance(part, dict) or not all(isinstance(each, Tensor) for each in part.values()):
        raise TypeError("it has something else in place of tensors by name")
    return part
