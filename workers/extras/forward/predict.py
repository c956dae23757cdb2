"""Predictions for all rows of a file."""

from collections.abc import Mapping
from pathlib import Path

from stageline.workers.extras.exchange.load import RunModel
from stageline.workers.script.arguments.arguments import Workers

from .forward_run import ForwardRun, Tell
from .input_file import Inputs
from .output_file import JoinedOutputs, write_outputs


def predict_rows(
    model: RunModel, inputs: Inputs, target: Path, batch_size: int | None, workers: Workers, tell: Tell
) -> Mapping[str, str]:
    """Writes to `target` what `model` returns for `inputs`, row by row, in batches of `batch_size` rows (None: the
    plan's). Returns what it returned besides tensors, by names. Raises what `ForwardRun` does, `DataError`, `OSError`;
    then there is no such file."""
    size = batch_size or model.plan.data.batch_size
    outputs = JoinedOutputs()
    with ForwardRun(model, workers, tell=tell) as run:
        for count, output in zip(inputs.sizes(size), run.predictions(inputs.batches(size)), strict=True):
            outputs.add(output, count)
    write_outputs(target, outputs.joined())
    return outputs.left_out
