"""The check of a plan whose batches a user's script brings."""

import re
from collections.abc import Iterator

from .errors import PlanError
from .keys.models import PlanTables

SUMS = ("rows", "loss")  # results of an evaluation for a script, besides the metrics


def metrics(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each metric of a script with the name of a sum that every evaluation returns: rows or loss."""
    for name in plan.model.metrics if plan.scripted else ():
        if (function := re.split("[:.]", name)[-1]) in SUMS:
            yield PlanError(
                "model.metrics", f"every evaluation returns {function} already; rename the function of {name}"
            )
