"""`stageline story`: the rows of its table."""

from stageline.workers.cli.commands.story import _rows

HOLDER = {"name": "worker-1", "life": 2}


def test_every_attempt_has_a_row_and_the_last_counts():
    found = {
        "stage": 1,
        "worker": 1,
        "attempts": [{"name": "worker-1", "life": 1, "state": "forward", "why": "was killed by SIGKILL"}],
        "state": "done",
        "holder": HOLDER,
        "actions": [{"action": "1F6", "start": 12.5, "end": 12.75}],
    }
    lost, counted = _rows(found, 12.0)
    assert lost == (1, 1, 1, "lost (forward)", "worker-1, life 1", "was killed by SIGKILL")
    assert counted == (1, 1, 2, "done", "worker-1, life 2", "1F6 500 ms, 250 ms")


def test_a_stage_that_has_not_begun_has_a_row_without_a_worker():
    found = {"stage": 0, "worker": 0, "attempts": [], "state": "waiting", "holder": None, "actions": []}
    assert list(_rows(found, 0.0)) == [(0, 0, 1, "waiting", "-", "-")]
