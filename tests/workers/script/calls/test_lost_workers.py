"""News of lost workers for a script, status by status."""

from typing import Any

from stageline.workers.script.calls.news import LostWorkers

KILLED = "was killed by SIGKILL"


def status(*recovering: dict[str, Any], checkpoint: int | None = 16, finished: int = 0) -> dict[str, Any]:
    workers = [{"index": 0, "pid": 70}, {"index": 1, "pid": 71}]
    return {"recovering": [*recovering], "checkpoint": checkpoint, "finished_floor": finished, "workers": workers}


def lost(index: int, pid: int, since: float, given: bool = False) -> dict[str, Any]:
    return {
        "index": index,
        "pid": pid,
        "stages": [index],
        "since": since,
        "how": KILLED,
        "left": 60 - since,
        "given": given,
    }


def test_each_loss_is_told_once_once_more_if_no_process_takes_the_place_and_once_more_when_one_computes_there():
    workers = LostWorkers("Start it")
    told = [
        list(workers.lines(facts))
        for facts in (
            status(),
            status(lost(1, 7, 0.1)),
            status(lost(1, 7, 4.9)),
            status(lost(1, 7, 5.1)),
            status(lost(1, 7, 6.0), lost(0, 8, 0.2), checkpoint=None),
            status(lost(1, 7, 9.0, given=True), lost(0, 8, 9.0, given=True)),
            status(lost(0, 8, 9.0, given=True)),
            status(lost(1, 7, 0.1)),  # in a container, it always has that pid
        )
    ]
    loss = f"worker 1 (stage 1) {KILLED}; its replacement begins at step 16"
    waits = (
        "waiting for worker 1 (stage 1), lost 5 s ago. Start it. The run ends with its newest checkpoint if none joins "
        "within 55 s"
    )
    other = f"worker 0 (stage 0) {KILLED}; its replacement begins at step 0"
    again = "worker 1 (stage 1) computes again, in process 71, 9.0 s after it was lost"
    other_again = "worker 0 (stage 0) computes again, in process 70, 9.0 s after it was lost"
    assert told == [[], [loss], [], [waits], [other], [], [again], [loss, other_again]]


def test_the_replacement_of_a_replacement_is_told_when_it_computes():
    workers = LostWorkers("")
    first, second = lost(1, 7, 1.0), lost(1, 8, 0.5)
    told = [list(workers.lines(facts)) for facts in (status(first), status(second), status())]
    assert [len(lines) for lines in told] == [1, 1, 1]
    assert "computes again, in process 71" in told[-1][0]


def test_a_loss_says_how_many_finished_steps_are_done_again():
    """Steps went backwards on the terminal, without a word."""
    workers = LostWorkers("")
    list(workers.lines(status(finished=21)))
    (line,) = workers.lines(status(lost(1, 7, 0.1), finished=16))
    assert line.endswith("begins at step 16, so that 5 steps are done again")


def test_what_a_worker_has_said_at_its_end_cannot_draw_on_the_terminal():
    (line,) = LostWorkers("").lines(status({**lost(0, 1, 0.0), "how": "ended\x1b[2J\nstageline: all is well"}))
    assert "ended\\x1b[2J\\nstageline" in line
