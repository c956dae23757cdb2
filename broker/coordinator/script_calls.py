"""Script of a run as its broker knows it: how many steps it has called for, whether it calls for more, its place."""

from stageline.broker.control.messages import Report
from stageline.broker.ledger.member import Member
from stageline.broker.ledger.script import script_among
from stageline.broker.ledger.wait_graph import Vacancy

from .run import RunConfig
from .state import RunState


def note_calls(run: RunState, member: Member, report: Report) -> None:
    """Take the number of training steps that the script has called for from its report; workers do not know it.

    The script alone knows after how many steps its run ends, once it makes no more calls. Until then it reports None,
    which replaces the report of a lost script before it.

    Args:
        run: The state.
        member: The sender.
        report: The report.
    """
    if member is run.script:
        run.stopping.note_calls(report.training_steps, present=member.reachable)


def callers(run: RunState) -> list[Member]:
    """Return the script as a list, empty unless the script is there and all workers have joined."""
    script = script_among(run.registry.reachable())
    return [script] if script is not None and run.registry.begun else []


def calls_on(run: RunState) -> str:
    """Return why the run's last step is not known yet; "" if no more calls are to come.

    If a script's place is empty, another script may follow and call for more: the run waits for that one, or stops
    after a lease.
    """
    script, called = run.script, run.stopping.called_for
    if run.config.scripted and called is None and (script is None or script.reachable):
        return "the script has not said that it makes no more calls"
    return ""


def script_vacancies(config: RunConfig) -> list[Vacancy]:
    """Return what can be done while the script's place is empty, as a list: empty for a run without a script."""
    again = "start the script again, with Line.resume, so that it resumes the run"
    place = Vacancy("start the script", again, config.leases.silence, "stops", replaced=False)
    return [place] if config.scripted else []
