"""Calls functions that users give: for samples, batches and targets."""

from collections.abc import Callable
from typing import Any

from stageline.pipeline.errors import DataError, describe_error, raised_by_user_code


def called(function: Callable[[], Any], failed: str) -> Any:
    """What user code returns. Raises `DataError`, which begins with `failed` and has the user's line."""
    try:
        return function()
    except BaseException as error:  # user code may raise anything; the cause is chained
        if not raised_by_user_code(error):
            raise
        raise DataError(f"{failed}: {describe_error(error)}") from error
