"""Addresses at which workers join, and what the script says of them."""

import socket
import threading
from unittest.mock import Mock

import pytest

from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.script.joined import (
    Absence,
    await_workers,
    check_address,
    command_there,
    queues_beside,
    workers_named,
)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7000", "tcp://[::1]:7000", "redis://host:6379/0", "unix:///r.sock"])
def test_an_address_for_other_machines_is_accepted(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://0.0.0.0:0", "tcp://*:*", "tcp://host", "7000", "redis://"])
def test_another_is_refused_with_one_that_works(address: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://0\.0\.0\.0:7000"):
        check_address(address)


def test_the_scripts_queues_are_beside_the_broker() -> None:
    assert queues_beside("tcp://10.0.0.4:7000") == "tcp://10.0.0.4:0"
    assert queues_beside("redis://host/1#digits") == "redis://host/1"  # the name is that of the broker


def test_the_command_for_the_other_machines_names_an_address_that_they_can_dial() -> None:
    assert command_there("tcp://0.0.0.0:7000") == f"stageline worker --join tcp://{socket.gethostname()}:7000"
    assert command_there("redis://host/1") == "stageline worker --join redis://host/1"
    assert "secret" not in command_there("redis://:secret@host/1")


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
    assert await_workers(client, 2, 0.2, ended) == Absence([0, 1], "no broker answered")
    assert client.ask.call_count == ended.wait.call_count
    client.ask.side_effect = [BrokerUnreachable("no broker answered"), {"phase": "waiting", "missing": [1]}] * 99
    absence = await_workers(client, 2, 0.2, ended)
    assert absence is not None
    assert 1 in absence.workers
    client.ask.side_effect = [BrokerUnreachable("no broker answered"), {"phase": "running", "missing": []}]
    assert await_workers(client, 2, 9, ended) is None
