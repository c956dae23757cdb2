"""Why a run waits, with what can be done about each of its empty places."""

from dataclasses import replace

from stageline.broker.ledger.explain import Diagnosis, diagnose
from stageline.broker.ledger.wait_graph import ClusterState, RootCause, Vacancy, WaitChain

from .pausing import in_effect, said
from .run import RunConfig
from .script_calls import script_vacancies
from .state import RunState


def why_waiting(run: RunState, now: float, worker: int | None = None) -> Diagnosis:
    """Return why the run waits, or why one of its workers does.

    Args:
        run: The state.
        now: Seconds since the epoch.
        worker: The worker's index; None for the whole run.
    """
    config, pause = run.config, run.pauses.present
    if pause is not None and in_effect(run):
        flushed = config.schedule.mode == "sync"
        there = "has done the steps before it" if flushed else "has come there, with earlier steps under way"
        text = f"the run {said(pause, now)}; every worker {there}, and waits"
        return Diagnosis(WaitChain((), RootCause.PAUSED, None), text, "`stageline run resume` has it go on")
    found = diagnose(
        ClusterState(
            config.schedule,
            config.placement,
            run.registry.members,
            run.replacements.pending,
            run.ledger,
            now,
            config.leases,
            [_vacancy(config, index) for index in range(len(config.schedule.placement))] + script_vacancies(config),
        ),
        worker,
    )
    if pause is None:
        return found
    return replace(found, text=f"{found.text}. Besides, the run {said(pause, now)}; not every worker has come there")


def _vacancy(config: RunConfig, index: int) -> Vacancy:
    broker = "--join LINE" if config.has_keys else "--broker URL"
    start = f"start `stageline worker CONFIG {broker} --index {index}`"
    if config.code is not None:
        command = f"stageline worker --join {'LINE' if config.has_keys else 'URL'} --index {index}"
        start = f"on its machine, in the folder with your code, start `{command}`"
    elif config.supervised:
        start = "wait: the process that started the broker starts a worker there"
    return Vacancy(start, start, config.patience, "is given up", replaced=config.restarts > 0)
