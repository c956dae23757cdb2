"""The entrance to a broker: keys beyond this machine, the same line after a restart, and a log of keys."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.gate import KEYS, KeyEvent
from stageline.broker.keys.admission import NotReady
from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.broker.keys.pairs import KeyPair, invite_pair, operator_pair
from stageline.pipeline.plan import read_plan
from stageline.workers.keys.keyring import own_pair
from stageline.workers.process import entrance as module
from stageline.workers.process.entrance import FORMER_LOG, INVITED, LOG, Entrance, KeyLog

BEYOND, HERE = "tcp://0.0.0.0:7000", "tcp://127.0.0.1:7000"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyPair:
    monkeypatch.setenv("STAGELINE_KEY_FILE", str(tmp_path / "own.key"))
    return own_pair({"STAGELINE_KEY_FILE": str(tmp_path / "own.key")})


def entrance(url: str, tmp_path: Path, *sets: str) -> Entrance:
    plan = read_plan("examples/mlp", sets=sets, environment={})
    return Entrance.of(plan, url, {"STAGELINE_KEY_FILE": str(tmp_path / "own.key")})


def test_a_broker_has_keys_beyond_this_machine_unless_its_plan_renounces_them(tmp_path: Path, own: KeyPair) -> None:
    keys = entrance(BEYOND, tmp_path).keys
    assert keys is not None
    assert keys.pair == own
    for url, insecure in ((HERE, False), (BEYOND, True), (HERE, True)):
        open_to_all = entrance(url, tmp_path, f"broker.insecure={str(insecure).lower()}")
        assert open_to_all.keys is None
        opened = open_to_all.open(MemoryStore(), "run-1", supervised=False)
        assert opened.join_line(url) == ""
        assert opened.access.summary == ({"insecure": True} if url == BEYOND else None)


def test_a_key_that_comes_before_the_register_is_loaded_waits_for_it(tmp_path: Path, own: KeyPair) -> None:
    """It was told to dial again, and did so after five seconds: a worker was lost to a short lease meanwhile."""
    store, other = MemoryStore(), KeyPair.generate().public
    register = entrance(BEYOND, tmp_path).open(store, "run-1", supervised=False).access.register
    assert register is not None
    register.admit(other, 0.0)
    store.put(KEYS, msgspec.to_builtins(register.record))
    again = entrance(BEYOND, tmp_path)
    assert again.keys is not None
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(again.keys.admission.admits, other)
        again.open(store, "run-1", supervised=False)
        assert answer.result()


def test_before_its_register_is_loaded_a_broker_admits_its_operator_and_has_others_dial_again(
    tmp_path: Path, own: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOADING", 0.01)
    made = entrance(BEYOND, tmp_path)
    assert made.keys is not None
    assert made.keys.admission.admits(operator_pair(own).public)
    with pytest.raises(NotReady):
        made.keys.admission.admits(own.public)
    made.open(MemoryStore(), "run-1", supervised=False)
    assert not made.keys.admission.admits(own.public)


def test_a_successor_prints_the_same_line_and_admits_who_has_enrolled(tmp_path: Path, own: KeyPair) -> None:
    store, other = MemoryStore(), KeyPair.generate().public
    first = entrance(BEYOND, tmp_path).open(store, "run-1", supervised=False)
    text = first.join_line(keyed(BEYOND, own.public))
    line = JoinLine.parse(text)
    assert line.broker == own.public
    assert not line.address.startswith(BEYOND[:-4])
    assert first.access.register is not None
    invited = invite_pair(line.secret).public
    assert first.access.register.admits(invited)
    first.access.register.enrol(invited.text, other, 0.0)
    store.put(KEYS, _record(first))
    again = entrance(BEYOND, tmp_path)
    assert again.open(store, "run-1", supervised=False).join_line(keyed(BEYOND, own.public)) == text
    assert again.keys is not None
    assert again.keys.admission.admits(other)
    elsewhere = entrance(BEYOND, tmp_path).open(MemoryStore(), "run-2", supervised=False)
    assert elsewhere.join_line(keyed(BEYOND, own.public)) != text


def test_after_a_revocation_a_successor_invites_by_another_line(tmp_path: Path, own: KeyPair) -> None:
    store = MemoryStore()
    first = entrance(BEYOND, tmp_path).open(store, "run-1", supervised=False)
    text = first.join_line(keyed(BEYOND, own.public))
    assert first.access.register is not None
    (invitation,) = first.access.register.record.invitations
    assert first.access.register.revoke(invitation.key, 0.0)
    store.put(KEYS, _record(first))
    again = entrance(BEYOND, tmp_path).open(store, "run-1", supervised=False)
    assert again.join_line(keyed(BEYOND, own.public)) != text
    assert again.access.register is not None
    assert not again.access.register.invites(invitation.key)


def test_a_broker_with_another_key_takes_no_invitation_of_the_former_one(tmp_path: Path) -> None:
    """The holder of a key that leaked can derive the secrets of all its invitations."""
    store = MemoryStore()
    first = entrance(BEYOND, tmp_path).open(store, "run-1", supervised=False)
    assert first.access.register is not None
    former = {each.key for each in first.access.register.record.invitations}
    (tmp_path / "own.key").unlink()
    again = entrance(BEYOND, tmp_path).open(store, "run-1", supervised=False)
    assert again.access.register is not None
    (invitation,) = again.access.register.record.invitations
    assert invitation.key not in former


@pytest.mark.parametrize("supervised", [False, True])
def test_an_invitation_ends_after_a_day_or_with_the_run_of_a_launcher(tmp_path: Path, supervised: bool) -> None:
    opened = entrance(BEYOND, tmp_path).open(MemoryStore(), "run-1", supervised=supervised)
    assert opened.access.register is not None
    opened.access.register.expire(0.0)
    assert len(opened.access.register.record.invitations) == 1
    opened.access.register.expire(2e9 + INVITED)
    assert len(opened.access.register.record.invitations) == int(supervised)


def test_the_log_of_keys_has_a_line_for_each_event_and_is_for_this_user_alone(tmp_path: Path) -> None:
    log = KeyLog(tmp_path)
    log.note([KeyEvent("enrolled", "k1.a", "worker-0", "desk"), KeyEvent("refused", "k1.b", detail="not admitted")])
    log.note([])
    log.note([KeyEvent("revoked", "k1.a", "worker-0", "desk")])
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [(each["what"], each["key"], each["host"]) for each in lines] == [
        ("enrolled", "k1.a", "desk"),
        ("refused", "k1.b", ""),
        ("revoked", "k1.a", "desk"),
    ]
    assert all(each["at"] > 0 for each in lines)
    assert (tmp_path / LOG).stat().st_mode & 0o777 == 0o600


def test_a_log_of_keys_that_cannot_be_written_does_not_stop_the_broker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KeyLog(tmp_path / "gone").note([KeyEvent("revoked", "k1.a")])
    assert LOG in capsys.readouterr().out


def _record(opened: module.OpenEntrance) -> dict[str, object]:
    assert opened.access.register is not None
    return msgspec.to_builtins(opened.access.register.record)


def test_a_log_that_is_full_becomes_the_former_one_and_both_are_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_LOGGED", 500)
    log = KeyLog(tmp_path)
    for number in range(20):
        log.note([KeyEvent("refused", f"k1.{number}", detail=100 * "x")])
    sizes = [(tmp_path / name).stat().st_size for name in (LOG, FORMER_LOG)]
    assert max(sizes) < 1000
    lines = [*(tmp_path / FORMER_LOG).read_text().splitlines(), *(tmp_path / LOG).read_text().splitlines()]
    kept = [json.loads(each)["key"] for each in lines]
    assert kept == [f"k1.{number}" for number in range(20 - len(kept), 20)]
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in (LOG, FORMER_LOG)} == {0o600}
    assert sorted(each.name for each in tmp_path.glob("keys.*")) == [LOG, FORMER_LOG]
