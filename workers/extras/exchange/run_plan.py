"""The plan of a run that is there, with the place of the code that it names.

runs/digits-20260131-101500-1f0c/plan.json       the plan as the run has it: options, cut, workers, seed
                                 process.json    where the plan's file is, which file names in it begin at
                                 code.json       the files of a script whose workers joined by names
"""

import sys
from pathlib import Path

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.load import references_of
from stageline.pipeline.model.object_names import is_of_script
from stageline.pipeline.plan import Plan
from stageline.workers.checkpoint.source import CheckpointSource
from stageline.workers.runs.notes import hashes_of, read_code
from stageline.workers.runs.owner import read_owner

PLAN_FILE = "stageline.toml"
_WAY_OUT = "Pass the module whose weights they are: stageline.load(RUN, model=...)"


def planned(source: CheckpointSource, place: Path | None = None) -> Plan:
    """The run's plan, whose file is `place` (or the folder that it is in); by default that of the command which has
    begun the run. Raises `ModelRefused` if the model is an object of a script, or the code is not there."""
    plan = source.plan
    if is_of_script(plan.model.factory):
        raise ModelRefused(
            f"run {source.run} is a script's, which gave its model as an object that no file names. {_WAY_OUT}; or go "
            "on with the run by Line.resume, and call line.predict"
        )
    _demand_code(source)
    if not any(":" in reference for _, reference in references_of(plan)):
        return plan
    return plan.model_copy(update={"file": _file_at(place) if place is not None else _former_file(source)})


def _file_at(place: Path) -> Path:
    file = place / PLAN_FILE if place.is_dir() else place
    if not file.parent.is_dir():
        raise ModelRefused(f"there is no folder {file.parent}: name the plan of the run, or the folder that it is in")
    return file.absolute()


def _former_file(source: CheckpointSource) -> Path:
    """The file of the plan that the run was begun with. A relative name begins where the run's folder of runs does, or
    here. Raises `ModelRefused`."""
    try:
        owner = read_owner(source.folder)
    except ValueError:
        owner = None
    named = "" if owner is None else owner.plan
    for folder in (_former_folder(source), Path()) if named else ():
        place = folder / named
        file = place / PLAN_FILE if place.is_dir() else place
        if file.exists():
            return file.absolute()
    was = f", which was {named}," if named else ""
    raise ModelRefused(
        f"the code of run {source.run} is beside its plan{was} and that is not here: name the plan, or the folder with "
        "the code, by plan= (stageline.load), or --plan (commands)"
    )


def _former_folder(source: CheckpointSource) -> Path:
    """The folder that the run was begun in, as far as `run.dir` tells."""
    runs = source.plan.run.dir
    return source.folder.resolve().parent if runs.is_absolute() else source.folder.resolve().parents[len(runs.parts)]


def _demand_code(source: CheckpointSource) -> None:
    """Puts the folder of a script's files first on the import path. Raises `ModelRefused` if it is not here, or they
    have changed since the run."""
    code = read_code(source.folder)
    if code is None or not code.files:
        return
    places = (Path(each) for each in ("", *sys.path))
    root = next((each.absolute() for each in places if all((each / file).is_file() for file in code.files)), None)
    if root is None:
        raise ModelRefused(
            f"the code of run {source.run}, {', '.join(code.files)}, is not here: go to the folder with the script. "
            f"{_WAY_OUT}"
        )
    now = hashes_of(root, code.files)
    if changed := [file for file, before in code.files.items() if now[file] != before]:
        raise ModelRefused(f"{', '.join(changed)} in {root} changed since run {source.run} was begun. {_WAY_OUT}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
