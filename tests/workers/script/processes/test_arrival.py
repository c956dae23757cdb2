"""The script waits for the workers on other machines, and says which are missing."""

import threading
from unittest.mock import Mock

from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.script.processes.remote_run import Absence, await_workers, workers_named


def test_workers_are_listed() -> None:
    assert [workers_named(each) for each in ([1], [0, 1], [0, 2, 3])] == [
        "worker 1",
        "workers 0 and 1",
        "workers 0, 2 and 3",
    ]


def test_as_long_as_the_broker_does_not_answer_all_workers_are_missing_and_it_is_not_asked_without_a_pause() -> None:
    ended, client = Mock(**{"is_set.return_value": False}), Mock()
    ended.wait.side_effect = threading.Event().wait
    client.ask.side_effect = BrokerUnreachable("no broker answered")
    assert await_workers(client, 2, 0.2, ended) == Absence([0, 1], "no broker answered [SL311]")
    assert client.ask.call_count == ended.wait.call_count
    client.ask.side_effect = [
        BrokerUnreachable("no broker answered"),
        {"phase": "waiting", "missing": [1], "declined": []},
    ] * 99
    absence = await_workers(client, 2, 0.2, ended)
    assert absence is not None
    assert 1 in absence.workers
    client.ask.side_effect = [BrokerUnreachable("no broker answered"), {"phase": "running", "missing": []}]
    assert await_workers(client, 2, 9, ended) is None


def test_a_process_that_cannot_join_is_told_once_and_named_in_the_end() -> None:
    """It said so on its own terminal alone, and the script went on waiting."""
    client, told = Mock(), Mock()
    refused = {"host": "edge", "pid": 77, "reason": "model.py differs\x1b[2J"}
    client.ask.side_effect = lambda *of, **more: {"phase": "waiting", "missing": [1], "declined": [refused]}
    line = r"a worker (process 77 on edge) cannot join: model.py differs\x1b[2J"
    assert await_workers(client, 2, 0.2, threading.Event(), told) == Absence([1], "", (line,))
    told.assert_called_once_with(line)
