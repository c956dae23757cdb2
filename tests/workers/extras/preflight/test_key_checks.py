"""Findings of `stageline doctor --keys` before a run, over real sockets."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from stageline.broker.control.messages import Answer
from stageline.broker.control.protocol import encode
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.keys.parties import Parties, Party
from stageline.broker.transports.base import open_server
from stageline.pipeline.addresses import parted
from stageline.workers.extras.preflight import doctor
from stageline.workers.extras.preflight.doctor import CheckResult, Health, examine_keys
from stageline.workers.keys.key_file import VARIABLE, new_pair
from support.control_channels import received
from support.keyed import BROKER, STRANGER, Admitted

ELSEWHERE = "tcp://10.0.0.4:7000"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "own.key"


def found(broker: str, path: Path, *, insecure: bool = False, parties: Parties = ()) -> dict[str, CheckResult]:
    results = examine_keys(broker, insecure=insecure, environment={VARIABLE: str(path)}, parties=parties)
    return {each.what: each for each in results}


@contextmanager
def broker_that_admits(*pairs: KeyPair) -> Iterator[str]:
    """The address of a broker that answers those whom it admits."""
    with closing(open_server("tcp://127.0.0.1:0", ServerKeys(BROKER, Admitted(list(pairs))))) as server:

        def serve() -> None:
            for sender, _ in received(server):
                server.send([(sender, encode(Answer("status/1", {})))])

        thread = threading.Thread(target=serve)
        if pairs:
            thread.start()
        yield server.endpoint
        if pairs:
            thread.join()


def test_a_machine_without_a_key_file_is_told_where_it_will_be_and_none_is_made(path: Path) -> None:
    results = found("tcp://127.0.0.1:5600", path)
    assert [results[what].health for what in ("CURVE", "own key", "broker")] == [Health.GOOD, Health.NOTE, Health.GOOD]
    assert str(path) in results["own key"].found
    assert "needs no keys" in results["broker"].found
    assert not path.exists()


def test_a_key_file_that_others_can_read_is_wrong(path: Path) -> None:
    new_pair(path)
    path.chmod(0o644)
    own = found(ELSEWHERE, path)["own key"]
    assert own.health is Health.BAD
    assert "chmod 600" in own.found


def test_an_address_beyond_this_machine_needs_a_key_or_the_word_insecure(path: Path) -> None:
    lacking, renounced = found(ELSEWHERE, path)["broker"], found(ELSEWHERE, path, insecure=True)["broker"]
    assert (lacking.health, renounced.health) == (Health.NOTE, Health.NOTE)
    assert f"{ELSEWHERE} has no key" in lacking.found
    assert "broker.insecure" in renounced.found


def test_a_broker_that_admits_this_machine_is_well(path: Path) -> None:
    own = new_pair(path)
    with broker_that_admits(own) as address:
        results = found(address, path)
    assert own.public.text in results["own key"].found
    assert results["broker"].health is Health.GOOD
    assert "admits that of this machine" in results["broker"].found


def test_a_broker_that_does_not_admit_this_machine_is_named_with_the_command_that_would(path: Path) -> None:
    own = new_pair(path)
    with broker_that_admits() as address:
        refused = found(address, path)["broker"]
        invited = found(JoinLine(parted(address)[0], BROKER.public, bytes(16)).text, path)["broker"]
    assert refused.health is Health.BAD
    assert f"keys admit {own.public.text}" in refused.found
    assert invited.health is Health.GOOD
    assert "has yet to join" in invited.found


@pytest.mark.parametrize("cut", [-1, -20])
def test_a_line_that_was_not_copied_whole_is_wrong_and_nothing_is_dialled(cut: int, path: Path) -> None:
    line = JoinLine(ELSEWHERE, BROKER.public, bytes(16)).text
    broker = found(line[:cut], path)["broker"]
    assert broker.health is Health.BAD
    assert "cut off" in broker.found


def test_another_brokers_key_and_a_broker_that_is_away_are_wrong(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ANSWER", 0.5)
    with broker_that_admits() as address:
        pass
    away = found(address, path)["broker"]
    assert away.health is Health.BAD
    assert "no broker answered" in away.found
    monkeypatch.setattr(doctor, "_ANSWER", 20.0)
    with broker_that_admits() as address:
        another = found(keyed(parted(address)[0], STRANGER.public), path)["broker"]
    assert another.health is Health.BAD
    assert "another key" in another.found


def test_a_machine_is_told_of_which_party_it_is_and_if_it_is_of_none(path: Path) -> None:
    lab = Party("lab", (new_pair(path).public.text,), (0, 2))
    of_lab = found("tcp://127.0.0.1:5600", path, parties=(lab,))["party"]
    assert of_lab.health is Health.GOOD
    assert f"lab, which has workers 0 and 2, by the key in {path}" in of_lab.found
    of_none = found("tcp://127.0.0.1:5600", path, parties=(Party("home", (STRANGER.public.text,)),))["party"]
    assert of_none.health is Health.BAD
    assert f"home ({STRANGER.public.short})" in of_none.found
