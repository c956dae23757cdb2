"""Key files: made once and for one user, and refused if others may read or replace them."""

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from stageline.broker.keys.pairs import KeyPair
from stageline.workers.keys.key_file import KeyExists, key_path, new_pair, read_pair
from stageline.workers.keys.private_file import KeyUnusable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return key_path(None, {"XDG_CONFIG_HOME": str(tmp_path)})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refusal(path: Path) -> str:
    with pytest.raises(KeyUnusable) as raised:
        read_pair(path)
    return str(raised.value)


def test_a_new_key_is_read_again_and_is_for_its_user_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        pair = new_pair(path)
    finally:
        os.umask(before)
    assert read_pair(path) == pair
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert [each.name for each in path.parent.iterdir()] == ["own.key"]
    assert pair.public.text in path.read_text()


def test_a_key_is_never_replaced(path: Path) -> None:
    pair = new_pair(path)
    with pytest.raises(KeyExists) as raised:
        new_pair(path)
    assert str(path) in str(raised.value)
    assert read_pair(path) == pair


def test_of_several_processes_that_make_a_key_at_once_one_does(path: Path) -> None:
    made: list[KeyPair] = []
    together = threading.Barrier(8)

    def make() -> None:
        together.wait()
        with suppress(KeyExists):
            made.append(new_pair(path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [read_pair(path)]


@pytest.mark.parametrize("open_to", [0o644, 0o640, 0o604, 0o620, 0o602, 0o700 | 0o010])
def test_a_key_file_that_others_may_use_is_refused_with_the_command_that_mends_it(path: Path, open_to: int) -> None:
    pair = new_pair(path)
    path.chmod(open_to)
    told = refusal(path)
    assert f"{open_to:04o}" in told
    assert f"chmod 600 {path}" in told
    path.chmod(0o600)
    assert read_pair(path) == pair


def test_a_folder_in_which_others_may_replace_the_key_is_refused(path: Path, tmp_path: Path) -> None:
    new_pair(path)
    link = tmp_path / "link.key"
    link.symlink_to(path)
    path.parent.chmod(0o777)
    for each in (path, link):
        assert f"0777, so others may replace it. Run: chmod go-w {path.parent}" in refusal(each)
    with pytest.raises(KeyUnusable):
        new_pair(path.with_name("other.key"))
    path.parent.chmod(0o1777)  # as /tmp, where each may replace only what is theirs
    assert read_pair(link) == read_pair(path)


def test_a_key_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_pair(path)
    os.chown(path, 4321, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert "4321" in refusal(path)


def test_a_path_with_spaces_is_quoted_in_the_command(tmp_path: Path) -> None:
    path = tmp_path / "my keys" / "own.key"
    new_pair(path)
    path.chmod(0o644)
    assert f"chmod 600 '{path}'" in refusal(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "# only a comment\n",
        "k1-secret.AAAA\n",
        "k1-secret.{0}\nk1-secret.{0}\n",
        "{0}\n",
        "k1.{0}\n",
        "k1-secret.{0}é\n",
    ],
)
def test_a_file_with_something_else_is_refused_without_showing_it(path: Path, content: str) -> None:
    new_pair(path)
    secret = path.read_text().split("k1-secret.")[1].strip()
    path.write_text(content.format(secret))
    told = refusal(path)
    assert str(path) in told
    assert secret not in told


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.key", 0o600)
    (tmp_path / "folder.key").mkdir(0o700)
    for name in ("pipe.key", "folder.key"):
        assert "not a regular file" in refusal(tmp_path / name)
    assert "stageline keys new" in refusal(tmp_path / "missing.key")


def test_the_key_of_a_process_is_where_the_environment_says(tmp_path: Path) -> None:
    config = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert key_path(None, config) == tmp_path / "stageline/keys/own.key"
    assert key_path("hospital", config) == tmp_path / "stageline/keys/hospital.key"
    assert key_path(None, {}) == Path.home() / ".config/stageline/keys/own.key"
    given = config | {"STAGELINE_KEY_FILE": "~/a.key"}
    assert key_path(None, given) == Path.home() / "a.key"
    assert key_path("hospital", given) == tmp_path / "stageline/keys/hospital.key"


@pytest.mark.parametrize("name", ["../own", "Own", "", ".own", "a/b", 33 * "a", "own.key"])
def test_a_name_that_would_lead_elsewhere_is_none(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a key"):
        key_path(name, {})
