"""The user's script as a member of the run: it has the place without stages, and calls the workers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stageline.broker.control.messages import Exited

from .member import SCRIPT, Member, describe_exit


@dataclass(slots=True)
class ScriptMember(Member):
    """The script of a run. No process of the run started it, and nothing starts it again."""

    @property
    def title(self) -> str:
        """The script's name in messages: "the script"."""
        return SCRIPT

    @property
    def gone(self) -> str:
        """The beginning of a sentence about the script's loss: "the script is gone: script (pid 102, host desk)"."""
        return f"the script is gone: {self.process}"

    @property
    def resumes(self) -> str:
        """The end of a sentence about a lost script's successor, which computes nothing: "is there again"."""
        return "is there again"

    @property
    def unable_to_finish(self) -> str:
        """The reason for which the script cannot have finished, continuing a sentence about it."""
        return "has no stages, and says that it has finished them"

    def stalled(self, now: float) -> float:
        """Return 0: the script's own code may take as long as it likes."""
        return 0.0

    def starting(self, silence: float) -> str:
        """Return, continuing a sentence about the script's place, that it is starting."""
        return f"is still starting, {silence:.1f} s after its last message"

    def describe_end(self, end: Exited) -> str:
        """Return how the script ended. Its status is not known, unless it was killed."""
        return "has ended" if end.status >= 0 else describe_exit(end)

    def occupies(self, now: float, *, others_free: bool) -> str:
        """Return why another script cannot have the place, and the way out."""
        return f"the run has its script: {self.process}, alive {self.ago(now)}; stop it first, or wait until it is lost"

    def recall_finished(self) -> None:
        """Change nothing: a script does not tell that it has finished; it leaves."""


def kind_of_member(stages: Sequence[int]) -> type[Member]:
    """Return the class of the member whose place has `stages`."""
    return Member if stages else ScriptMember


def script_among(members: Iterable[Member]) -> ScriptMember | None:
    """Return the script; None if it is not among `members`."""
    return next((member for member in members if isinstance(member, ScriptMember)), None)
