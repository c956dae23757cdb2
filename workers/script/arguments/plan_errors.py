"""What a plan refuses, in the words of a `Line`: a script has arguments, where a plan file has keys.

workers.0.threads = 0: ...          threads = 0: ...
--set: recovery.leese: ...          settings: recovery.leese: ...
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import PlanError, PlanRefused

_ROWS, _MICROBATCHES = "data.batch_size", "schedule.microbatches"
_ARGUMENTS = {
    "broker.url": "broker",
    _ROWS: "microbatches",
    "model.cut": "cut",
    "model.loss": "loss",
    "model.metrics": "metrics",
    "model.stages": "stages",
    "model.weights": "weights",
    "run.dir": "folder",
    "run.name": "name",
    "run.seed": "seed",
    _MICROBATCHES: "microbatches",
    "schedule.name": "schedule",
    "schedule.window": "window",
    "workers": "placement",
}
_OF_WORKERS = {"stages": "placement", "device": "device", "threads": "threads"}
_TYPED, _SETTINGS = "--set", "settings"


@contextmanager
def in_arguments_words() -> Iterator[None]:
    """A context whose `PlanRefused` and `ModelRefused` name arguments."""
    try:
        yield
    except PlanRefused as refused:
        raise PlanRefused(arguments_errors(refused.errors)) from None
    except ModelRefused as refused:
        if (text := _with_arguments(str(refused))) == str(refused):
            raise
        raise ModelRefused(text) from None


def arguments_errors(errors: Sequence[PlanError]) -> list[PlanError]:
    """The errors, each once; a key that a setting has given keeps its name."""
    if _MICROBATCHES in {error.key for error in errors}:  # a scripted plan has their number as the batch's size, too
        errors = [error for error in errors if error.key != _ROWS]
    return list(dict.fromkeys(map(_of_argument, errors)))


def _of_argument(error: PlanError) -> PlanError:
    if error.where == _TYPED:
        return replace(error, where=_SETTINGS)
    key = _argument(error.key)
    reason = error.reason.replace("--resume", "resume=")
    if error.key.startswith("schedule."):
        reason = reason.replace('name = "', 'schedule = "')
    return replace(error, key=key, reason=reason)


def _argument(key: str) -> str:
    of_worker = re.fullmatch(r"workers\.\d+\.(\w+)", key)
    return _OF_WORKERS.get(of_worker[1], key) if of_worker else _ARGUMENTS.get(key, key)


def _with_arguments(text: str) -> str:
    return re.sub(r"\bmodel\.(cut|stages|weights)\b", r"\1", text)
