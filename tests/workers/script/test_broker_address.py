"""Addresses at which workers on other machines join, and what is said of them."""

import os
import shlex
import socket
from pathlib import Path

import pytest

from stageline.broker.keys.join_line import JoinLine
from stageline.pipeline.plan import Plan
from stageline.workers.keys.keyring import own_pair
from stageline.workers.script.calls.news import command_there
from stageline.workers.script.checks import check_address, queues_beside
from support import small_plans


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7000", "tcp://[::1]:7000", "redis://host:6379/0", "unix:///r.sock"])
def test_an_address_for_other_machines_is_accepted(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://0.0.0.0:0", "tcp://*:*", "tcp://host", "7000", "redis://"])
def test_another_is_refused_with_one_that_works(address: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://0\.0\.0\.0:7000"):
        check_address(address)


def test_an_address_of_another_machine_is_refused_before_a_broker_is_started() -> None:
    """The broker was started six times first."""
    with pytest.raises(ValueError, match=r"192\.0\.2\.1.* tcp://0\.0\.0\.0:7000 "):
        check_address("tcp://192.0.2.1:7000")
    check_address("tcp://localhost:7000")


def test_the_scripts_queues_are_beside_the_broker() -> None:
    assert queues_beside("tcp://10.0.0.4:7000") == "tcp://10.0.0.4:0"
    assert queues_beside("redis://host/1#digits") == "redis://host/1"  # the name is that of the broker


def run_at(address: str, *, insecure: bool = False) -> Plan:
    return small_plans.plan(broker__url=address, broker__insecure=insecure)


def test_the_command_for_the_other_machines_names_an_address_that_they_can_dial() -> None:
    there = command_there(run_at("tcp://0.0.0.0:7000", insecure=True), "line-1")
    assert there == f"stageline worker --join tcp://{socket.gethostname()}:7000"
    there = command_there(run_at("redis://host/1", insecure=True), "line-1")
    assert there == "stageline worker --join redis://host/1"
    assert "secret" not in command_there(run_at("redis://:secret@host/1", insecure=True), "line-1")
    assert "secret" not in command_there(run_at("redis://:secret@host/1"), "line-1")


def test_the_command_for_the_other_machines_has_the_join_line_of_a_broker_with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    command = shlex.split(command_there(run_at("tcp://0.0.0.0:7000"), "line-1"))
    assert command[:3] == ["stageline", "worker", "--join"]
    line = JoinLine.parse(command[3])
    assert (line.address, line.broker) == (f"tcp://{socket.gethostname()}:7000", own_pair(os.environ).public)
