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
from stageline.pipeline.plan.difference import LAYOUT_KEYS

_ROWS, _MICROBATCHES = "data.batch_size", "schedule.microbatches"
_ARGUMENTS = {
    "broker.url": "broker",
    _ROWS: "microbatches",
    "features": "features",
    "memory.recompute": "recompute",
    "model.accept_difference": "accept_difference",
    "model.autocast": "autocast",
    "model.cut": "cut",
    "model.loss": "loss",
    "model.metrics": "metrics",
    "model.stages": "stages",
    "model.trainable": "trainable",
    "model.weights": "weights",
    "run.dir": "folder",
    "run.name": "name",
    "run.seed": "seed",
    "lr_scheduler.every": "lr_every",
    "optimizer.clip_norm": "clip_norm",
    "optimizer.ema_decay": "ema_decay",
    "optimizer.groups": "groups",
    _MICROBATCHES: "microbatches",
    "schedule.accumulate": "accumulate",
    "schedule.name": "schedule",
    "schedule.window": "window",
    "taps.layers": "taps",
    "workers": "placement",
}
_OF_WORKERS = {"stages": "placement", "device": "device", "threads": "threads"}
_TYPED, _SETTINGS = "--set", "settings"
_SAID = {
    LAYOUT_KEYS: 'cut, stages, placement, schedule, window, settings["recovery.snapshot_every"] and taps',
    "leave out --resume to begin another run": "begin another run with Line(...)",
    "--resume": "Line.resume",
    "another plan": "other arguments",
    "the plan that it began with": "the arguments that it began with",
    "here: this plan": "here: these",
    "this plan": "this line",
    "Resume it with": "Call Line.resume with",
    "workers.N.device and workers.N.threads": "device and threads",
}


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
    reason = error.reason if error.key else _with_every_argument(error.reason)
    if error.key.startswith("schedule."):
        reason = reason.replace('name = "', 'schedule = "')
    return replace(error, key=key, told=reason)


def _with_every_argument(reason: str) -> str:
    """A reason that names keys itself: of a run that was begun in another way."""
    if f"{_MICROBATCHES}: " in reason:  # as above
        reason = re.sub(rf"{re.escape(_ROWS)}: \w+ here, \w+ there; ", "", reason)
    for planned, said in _SAID.items():
        reason = reason.replace(planned, said)
    reason = re.sub(r"\bworkers\.(\d+)\.(stages|device|threads)\b", _of_worker, reason)
    return re.sub(r"\b[a-z]+\.[a-z_]+\b", lambda key: _ARGUMENTS.get(key[0], key[0]), reason)


def _of_worker(key: re.Match[str]) -> str:
    return f"{_OF_WORKERS[key[2]]} of worker {key[1]}"


def _argument(key: str) -> str:
    of_worker = re.fullmatch(r"workers\.\d+\.(\w+)", key)
    return _OF_WORKERS.get(of_worker[1], key) if of_worker else _ARGUMENTS.get(key, key)


def _with_arguments(text: str) -> str:
    text = text.replace("model.accept_difference = true", "accept_difference=True")
    return re.sub(r"\bmodel\.(cut|stages|trainable|weights)\b", r"\1", text)
