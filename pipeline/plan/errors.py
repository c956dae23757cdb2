"""Errors in a plan, each with its place, for the user who wrote the plan.

An error keeps the settings that its reason names apart from the text: a script has arguments where a plan has keys.

    PlanError("schedule.window", (Setting("schedule.name", "1f1b"), " does not use it"))

    in a plan        schedule.window = [1, 1]: schedule.name = "1f1b" does not use it
    in a script      window = [1, 1]: schedule = "1f1b" does not use it
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stageline.pipeline.addresses import all_masked
from stageline.pipeline.errors import ExitCode, StagelineError

_LONGEST = 60  # characters of a value that an error shows


def shown(value: object) -> str:
    """Return `value` as a plan file would write it, without passwords in addresses, cut to 60 characters."""
    text = json.dumps(all_masked(value), ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


@dataclass(frozen=True, slots=True)
class Wording:
    """The words in which errors name settings.

    Attributes:
        name: Returns the name of a dotted key.
        show: Returns a value as its user would write it.
        afresh: Text that says how to begin another run instead of resuming one.
        of_script: True if the settings are arguments of a script.
    """

    name: Callable[[str], str]
    show: Callable[[object], str]
    afresh: str
    of_script: bool = False


IN_A_PLAN = Wording(str, shown, "leave out --resume to begin another run")


@runtime_checkable
class ReasonPart(Protocol):
    """A part of a reason whose text depends on the words of the user."""

    def said(self, words: Wording) -> str:
        """Return the text of the part in `words`."""


Reason = str | tuple[object, ...]  # the parts of a text, told as `str` has them; or in words, if they are ReasonParts


@dataclass(frozen=True, slots=True)
class Setting:
    """A dotted key of the plan in a reason, with its value if `value` is not None."""

    key: str
    value: object = None

    def __str__(self) -> str:
        """Return the setting in the words of a plan file."""
        return self.said(IN_A_PLAN)

    def said(self, words: Wording) -> str:
        """Return the key, or `key = value` if there is a value, in `words`."""
        name = words.name(self.key)
        return name if self.value is None else f"{name} = {words.show(self.value)}"


@dataclass(frozen=True, slots=True)
class EachOnce:
    """Parts of a reason in a row, joined by `between`; a text that several parts have appears once."""

    parts: tuple[ReasonPart, ...]
    between: str = "; "

    def said(self, words: Wording) -> str:
        """Return the parts in `words`, joined, without repetitions."""
        return self.between.join(dict.fromkeys(part.said(words) for part in self.parts))


@dataclass(frozen=True, slots=True)
class ForEach:
    """A part of a reason with one text for users of a plan and another for users of a script."""

    of_plan: str
    of_script: str

    def said(self, words: Wording) -> str:
        """Return `of_script` if `words` are those of a script, else `of_plan`."""
        return self.of_script if words.of_script else self.of_plan


OTHER_SETTINGS = ForEach("another plan", "other arguments")
RESUME_AS_BEGUN = ForEach(
    " (here: this plan, there: the run's). Resume it with the plan that it began with",
    " (here: these, there: the run's). Call Line.resume with the arguments that it began with",
)


@dataclass(frozen=True, slots=True)
class Afresh:
    """A part of a reason that says how to begin another run."""

    def said(self, words: Wording) -> str:
        """Return `words.afresh`."""
        return words.afresh


def say(reason: Reason, words: Wording = IN_A_PLAN) -> str:
    """Return `reason` as one text in `words`."""
    return reason if isinstance(reason, str) else "".join(_said(part, words) for part in reason)


def _said(part: object, words: Wording) -> str:
    return part.said(words) if isinstance(part, ReasonPart) else str(part)


@dataclass(frozen=True, slots=True)
class PlanError:
    """An error in a plan.

    Attributes:
        key: The dotted key; "" for the file as a whole.
        told: The reason: what is wrong with the key, and what would be right.
        where: The place that set the key: "stageline.toml:7", "--set", "STAGELINE_RUN__SEED"; "" if no one place did.
        value: The value as written; "" where the key itself is wrong.
    """

    key: str
    told: Reason
    where: str = ""
    value: str = ""

    @property
    def reason(self) -> str:
        """The reason as text, in the words of a plan file."""
        return say(self.told)

    def __str__(self) -> str:
        """Return the error in one line: `where: key = value: reason`, without the parts that are empty."""
        setting = f"{self.key} = {self.value}" if self.value else self.key
        return ": ".join(part for part in (self.where, setting, self.reason) if part)


class PlanRefused(StagelineError):
    """Error that a plan cannot work: a key, a value, or several together.

    Attributes:
        errors: Everything that was found wrong with the plan, in one tuple.

    Mend: Change what each line names; the line begins with the file and the line in it. `stageline plan` checks the
    plan alone. The keys are in docs/reference/plan.md.

    Example: --set: run.steps = -6: expected a whole number of at least 1
    """

    error_code = "SL101"
    exit_code = ExitCode.REFUSED

    def __init__(self, errors: Sequence[PlanError]) -> None:
        """Make the error; its text has one line for each of `errors`."""
        super().__init__("\n".join(map(str, errors)))
        self.errors = tuple(errors)
