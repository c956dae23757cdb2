"""What is wrong with a plan, and where, for the user who wrote it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.pipeline.addresses import all_masked
from stageline.pipeline.errors import ExitCode, StagelineError

_LONGEST = 60  # characters of a value that an error shows


@dataclass(frozen=True, slots=True)
class PlanError:
    """One thing that is wrong: `key` is dotted ("" for the file as a whole), `reason` also names what would be right.

    `where` names the place that set the key: "stageline.toml:7", "--set", "STAGELINE_RUN__SEED"; "" if no one place
    did. `value` is the value as written, "" where the key itself is the trouble.
    """

    key: str
    reason: str
    where: str = ""
    value: str = ""

    def __str__(self) -> str:
        setting = f"{self.key} = {self.value}" if self.value else self.key
        return ": ".join(part for part in (self.where, setting, self.reason) if part)


class PlanRefused(StagelineError):
    """The plan cannot work; `errors` holds everything that was found wrong with it, at once."""

    exit_code = ExitCode.REFUSED

    def __init__(self, errors: Sequence[PlanError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = tuple(errors)


def shown(value: object) -> str:
    """`value` as a plan file would write it, without passwords in addresses, shortened."""
    text = json.dumps(all_masked(value), ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
