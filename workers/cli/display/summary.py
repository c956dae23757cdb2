"""What a finished run has come to, for people."""

from pathlib import Path

from stageline.workers.runs.result import Result

from .tables import duration


def summary(result: Result, folder: Path) -> str:
    """A line for each of the things that everybody wants to know of the run in `folder`."""
    rows = {
        "run": str(folder),
        "steps": str(result.steps),
        "loss": "no rows in the last step" if result.loss is None else f"{result.loss:.6g}",
        **{name: f"{float(value):.6g}" for name, value in result.metrics.items()},
        "weights_sha256": result.weights_sha256,
        "time": duration(result.seconds),
        "restarts": str(result.restarts),
    }
    widest = max(map(len, rows))
    return "\n".join(f"{name:{widest}}  {value}" for name, value in rows.items())
