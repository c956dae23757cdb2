"""The key of this user on this machine, and the pairs that processes dial with."""

import os
import stat
from pathlib import Path

import pytest

from stageline.broker.errors import BadKey
from stageline.broker.keys.join_line import JoinLine, keyed
from stageline.broker.keys.pairs import KeyPair, invitation_secret, operator_pair
from stageline.workers.keys.key_file import new_pair, read_pair
from stageline.workers.keys.keyring import own_broker, own_join_line, own_pair, pair_towards
from stageline.workers.keys.private_file import KeyUnusable


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_the_key_is_made_when_it_is_first_needed_and_stays(home: dict[str, str], tmp_path: Path) -> None:
    pair = own_pair(home)
    file = tmp_path / "stageline" / "keys" / "own.key"
    assert own_pair(home) == read_pair(file) == pair
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert own_pair({"XDG_CONFIG_HOME": str(tmp_path / "another")}) != pair


def test_a_service_without_a_home_folder_has_its_key_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(KeyUnusable, match=r"no home folder.*Set STAGELINE_KEY_FILE to "):
        own_pair({})
    file = tmp_path / "own.key"
    assert own_pair({"STAGELINE_KEY_FILE": str(file)}) == read_pair(file)


def test_a_folder_in_which_no_key_can_be_made_is_named_and_one_with_a_key_serves(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for folder in (tmp_path / "file", Path("/proc/self")):  # root may write to what is only marked as read-only
        with pytest.raises(KeyUnusable, match=f"{folder}/.* cannot be made: .*Set STAGELINE_KEY_FILE"):
            own_pair({"XDG_CONFIG_HOME": str(folder)})
    keys = tmp_path / "secrets"
    pair = new_pair(keys / "key")
    keys.chmod(0o500)
    assert own_pair({"STAGELINE_KEY_FILE": str(keys / "key")}) == pair
    keys.chmod(0o700)


def test_an_address_without_a_key_is_dialled_without_a_pair_and_no_key_is_made(
    home: dict[str, str], tmp_path: Path
) -> None:
    for url in ("tcp://desk:7000", "ipc:///tmp/broker", "redis://host:6379/0#line"):
        assert pair_towards(url, home) is None
    assert not list(tmp_path.iterdir())


def test_the_operators_pair_is_for_the_broker_with_this_users_key_alone(home: dict[str, str]) -> None:
    own, other = own_pair(home), KeyPair.generate()
    assert pair_towards(keyed("tcp://desk:7000", other.public), home) == own
    url, operator = own_broker("tcp://127.0.0.1:7000", home)
    assert (url, operator) == (keyed("tcp://127.0.0.1:7000", own.public), operator_pair(own))
    assert pair_towards(url, home) == operator != own


def test_the_secret_of_a_join_line_is_no_part_of_an_address_to_dial(home: dict[str, str]) -> None:
    with pytest.raises(BadKey, match="is a join line"):
        pair_towards(own_join_line("tcp://desk:7000", "run-1", home), home)


def test_a_run_has_one_join_line_with_a_host_that_others_can_dial(home: dict[str, str]) -> None:
    own, text = own_pair(home), own_join_line("tcp://0.0.0.0:7000", "run-1", home)
    line = JoinLine.parse(text)
    assert line == JoinLine(line.address, own.public, invitation_secret(own, "run-1", 0))
    assert line.address == f"tcp://{os.uname().nodename}:7000"
    assert (
        own_join_line("tcp://0.0.0.0:7000", "run-1", home) == text != own_join_line("tcp://0.0.0.0:7000", "run-2", home)
    )
