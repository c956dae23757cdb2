"""What a run has measured, in its folder: a line of JSON for each training step, and for each evaluation.

metrics.jsonl        {"kind":"step","step":0,"loss":2.31,"learning_rates":[0.1],"rows":32,"time":1795415517.2}
                     {"kind":"step","step":1,"loss":2.29,"learning_rates":[0.1],"rows":32,"time":1795415517.3}
                     {"kind":"evaluation","step":2,"loss":2.4,"metrics":{"accuracy":0.31},"time":1795415517.5}
evaluations.jsonl    the same, of the evaluations that a script has called for; written by the script

`step` of a training step counts from 0; of an evaluation, it is how many steps were trained before. So the lines after
C steps are those of steps before C, and of evaluations up to C. A writer that was killed may leave half a line.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stageline.workers.disk.atomic_file import draft_of, make_folder, publish, sync

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"

Value = float | Literal["nan", "inf", "-inf"] | None  # a text where JSON has no number; None where there were no rows


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """Training step `step`: its loss, None without rows; the norm of its gradients, where they are clipped; the
    learning rates of the last stage's groups in it; its rows; its end there, in seconds since the epoch."""

    step: int
    loss: float | None
    gradient_norm: float | UnsetType = UNSET
    learning_rates: tuple[float, ...] = ()
    rows: int = 0
    time: float


class EvaluationMetrics(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """An evaluation after `step` training steps: means over its rows. `fit`: it belongs to that call of `Line.fit` in
    its script, counted from 1."""

    step: int
    loss: Value = None
    metrics: Mapping[str, Value] = {}
    time: float
    fit: int | UnsetType = UNSET

    @property
    def values(self) -> dict[str, float | None]:
        """The loss ("loss") and the metrics."""
        found = {"loss": self.loss, **self.metrics}
        return {name: None if value is None else float(value) for name, value in found.items()}


MetricsLine = StepMetrics | EvaluationMetrics
_DECODER: msgspec.json.Decoder[MetricsLine] = msgspec.json.Decoder(MetricsLine)
_ENCODER = msgspec.json.Encoder()


def evaluation_line(step: int, values: Mapping[str, float | None], time: float, fit: int | None) -> EvaluationMetrics:
    """Of `values` by metric, "loss" among them or not."""
    written = {name: _written(value) for name, value in values.items()}
    loss = written.pop("loss", None)
    return EvaluationMetrics(step=step, loss=loss, metrics=written, time=time, fit=UNSET if fit is None else fit)


def encoded(line: MetricsLine) -> bytes:
    """As it stands in the file."""
    return _ENCODER.encode(line) + b"\n"


def decoded(text: bytes) -> MetricsLine | None:
    """None if `text` is no whole line of a file of metrics."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return _DECODER.decode(text) if text.endswith(b"\n") else None
    return None


def lines_in(file: BinaryIO) -> Iterator[MetricsLine]:
    """The whole lines from where `file` stands; others are left out."""
    return (line for line in map(decoded, file) if line is not None)


def metrics_in(folder: Path) -> Iterator[MetricsLine]:
    """All lines in the folder of a run, in the order of training. Raises `FileNotFoundError` if it has none."""
    files = [folder / name for name in (METRICS, EVALUATIONS) if (folder / name).exists()]
    if not files:
        raise FileNotFoundError(folder / METRICS)
    return heapq.merge(*map(_lines_of, files), key=place_of)


def place_of(line: MetricsLine) -> tuple[int, bool]:
    """Lines in the order of training ascend in it: an evaluation after 2 steps comes before step 2."""
    return line.step, isinstance(line, StepMetrics)


def is_after(line: MetricsLine, step: int) -> bool:
    """Whether more than `step` steps had to be trained for `line`."""
    return line.step > step or (line.step == step and isinstance(line, StepMetrics))


def keep_lines(source: Path, step: int, target: Path) -> int:
    """Replaces `target` by the lines in `source` that are not after `step` training steps, in one instant for readers.
    Returns the newest step of an evaluation among them, -1 without one. Raises `OSError`; then nothing has changed."""
    newest = -1
    make_folder(target.parent)
    draft = draft_of(target)
    try:
        with draft.open("xb") as file:
            for line in _kept(source, step):
                newest = line.step if isinstance(line, EvaluationMetrics) else newest
                file.write(encoded(line))
        sync(draft)
        publish(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return newest


def _kept(source: Path, step: int) -> Iterable[MetricsLine]:
    return (line for line in _lines_of(source) if not is_after(line, step))


def _lines_of(path: Path) -> Iterator[MetricsLine]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        yield from lines_in(file)


def _written(value: float | None) -> Value:
    if value is None or isfinite(value):
        return value
    return "nan" if value != value else "inf" if value > 0 else "-inf"
