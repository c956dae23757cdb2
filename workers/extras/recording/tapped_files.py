"""Names and forms of the files in the folder `taps` of a run.

taps/about.json                             which layers are tapped, of which stages, at which steps
taps/stage-2/step-120-3.safetensors         what the tapped layers of stage 2 returned for microbatch 3 of step 120
taps/stage-2/evaluation-4-3.safetensors     the same of microbatch 3 of evaluated batch 4
taps/samples/step-120-3.safetensors         that microbatch: the numbers of its rows in the data, and its targets

A tensor is called by its layer and its place in what the layer returned: "encoder.layer.40", "encoder.layer.40[0]".
All files follow from the plan and the data alone: a worker that computes a step again writes the same bytes again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from torch import Tensor

from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import Tree, leaves

FOLDER = "taps"
ABOUT = "about.json"
SAMPLES = "samples"  # the folder, and the tensor of the rows' numbers
TARGETS = "targets"
_BATCHES = {False: "step", True: "evaluated batch"}  # by `TapPlace.evaluated`: words, and beginnings of file names
_FILES = {False: "step", True: "evaluation"}
_NAME = re.compile(r"(step|evaluation)-(\d+)-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True, order=True)
class TapPlace:
    """Microbatch of training step `step`, or, if `evaluated`, of evaluated batch `step`."""

    evaluated: bool
    step: int
    microbatch: int

    def __str__(self) -> str:
        """Return the name of the microbatch, for people."""
        return f"microbatch {self.microbatch} of {_BATCHES[self.evaluated]} {self.step}"

    @property
    def file(self) -> str:
        """Name of the microbatch's file."""
        return f"{_FILES[self.evaluated]}-{self.step}-{self.microbatch}.safetensors"


class TapLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tapped layer, and the stage that computes it."""

    name: str
    stage: int


class TapsAbout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of `about.json`. `layers` are in the model's order; steps that are divisible by `every` are tapped."""

    schema: Literal["taps/1"] = "taps/1"
    layers: tuple[TapLayer, ...]
    every: int
    evaluation: bool
    microbatches: int


def about(plan: Plan, layers: Mapping[int, tuple[str, ...]], microbatches: int) -> TapsAbout | None:
    """Return the description that all workers write; None if the plan taps no layer.

    Args:
        plan: Plan of the run.
        layers: Names of the tapped layers, by stage.
        microbatches: Number of microbatches of a step.
    """
    if plan.taps is None:
        return None
    listed = tuple(TapLayer(name, stage) for stage, names in sorted(layers.items()) for name in names)
    return TapsAbout(layers=listed, every=plan.taps.every, evaluation=plan.taps.evaluation, microbatches=microbatches)


def place_of(path: Path) -> TapPlace | None:
    """Return the microbatch that a file is of; None for a draft, or another file."""
    found = _NAME.fullmatch(path.name)
    return None if found is None else TapPlace(found[1] == "evaluation", int(found[2]), int(found[3]))


def stage_folder(taps: Path, stage: int) -> Path:
    """Return the folder of a stage's files."""
    return taps / f"stage-{stage}"


def named_tensors(name: str, tree: Tree) -> dict[str, Tensor]:
    """Return the tensors of `tree` by their names in a file, which begin with `name`. Other leaves are left out."""
    return {f"{name}{path}": leaf for path, leaf in leaves(tree) if isinstance(leaf, Tensor)}
