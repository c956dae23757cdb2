"""Measures of a run of two workers, in which each field has a number of its own."""

from stageline.broker.control.measures import QueueMeasures, RunMeasures, StageMeasures, WorkerMeasures
from stageline.broker.ledger.times import WaitCause


def measures(run: str = "digits-1") -> RunMeasures:
    waited = {cause.name.lower(): 400.5 + place for place, cause in enumerate(WaitCause)}
    queue = QueueMeasures(
        queue="forward-1", put=501, taken=502, put_bytes=503, resent=504, duplicates=505, damaged=506, lost=507,
        ready=508, in_flight=509, retained=510, bytes=511, credit_used=512, credit_limit=513, oldest=514.5,
    )  # fmt: skip
    return RunMeasures(
        run=run, name="digits", schedule="1f1b", mode="sync", phase="running",
        paused=False, stalled=101.5, began=101.75, steps=102, finished=103,
        planned=104, bounds=[0.5, 1.0, 25.0], took=[1, 2, 0, 1], took_seconds=42.5, best=105.5, bubble=0.25,
        planned_bubble=0.125, loss=106.5, gradient_norm=107.5, evaluation={"accuracy": 108.5, "f1": "nan"},
        checkpoint=109, checkpoint_at=110.5, faulty=False, recovering=111, recoveries=112, recovery_seconds=113.5,
        oddities={"damaged": 114},
        workers=[
            WorkerMeasures(
                worker=0, present=True, losses=201, heard=202.5, idle=0.75, actions=203, memory=204, retained=205,
                faulty=True, cut_off=True, ahead=206.5,
            ),
            WorkerMeasures(worker=1, present=False, losses=207),
        ],
        stages=[
            StageMeasures(stage="0", worker=0, steps=301, computed=302.5, waited=waited),
            StageMeasures(stage="1.0", worker=1, steps=303, computed=304.5, waited=waited),
        ],
        queues=[queue, QueueMeasures(queue="backward-0")],
    )  # fmt: skip
