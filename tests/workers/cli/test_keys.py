"""`stageline keys`: a key is made, shown, and never replaced; its secret is printed nowhere."""

from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.app import run
from support.answers import conforming


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("STAGELINE_KEY_FILE", raising=False)
    return tmp_path / "stageline" / "keys"


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run([*words.split(), "--json"]) == ExitCode.OK
    return conforming(capsys.readouterr().out)


def test_a_key_that_is_made_is_shown_again_and_its_secret_is_not(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = shown("keys new", capsys)
    assert made == {"schema": "key/1", "key": made["key"], "file": str(config / "own.key"), "encrypted": False}
    assert shown("keys show", capsys) == made
    assert shown("keys new hospital", capsys)["key"] != made["key"]
    assert run(["keys", "show"]) == ExitCode.OK
    printed = capsys.readouterr()
    assert made["key"] in printed.out
    secret = (config / "own.key").read_text().split("k1-secret.")[1].strip()
    assert secret not in printed.out + printed.err


def test_a_second_key_of_a_name_and_a_missing_key_are_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "show"]) == ExitCode.REFUSED
    assert "[SL604]" in capsys.readouterr().err
    assert run(["keys", "new"]) == ExitCode.OK
    assert run(["keys", "new"]) == ExitCode.FAILED
    told = capsys.readouterr().err
    assert "[SL605]" in told
    assert str(config / "own.key") in told
    assert run(["keys", "new", "../own"]) == ExitCode.USAGE


def test_the_environment_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAGELINE_KEY_FILE", str(tmp_path / "mine.key"))
    assert shown("keys new", capsys)["file"] == str(tmp_path / "mine.key")
    assert shown("keys show", capsys)["file"] == str(tmp_path / "mine.key")


def test_doctor_reads_the_line_in_a_file_and_takes_no_other_text_for_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.txt").write_text("tcp://desk:7000#k1.2n8F\n")
    assert run(["doctor", "--keys", "--broker", "@line.txt"]) == ExitCode.FAILED
    assert "is cut off" in capsys.readouterr().out
    assert run(["doctor", "--keys", "--broker", "desk"]) == ExitCode.USAGE


def test_an_encrypted_key_is_shown_without_its_passphrase(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "passphrase").write_text("correct horse battery\n")
    (tmp_path / "passphrase").chmod(0o600)
    monkeypatch.setenv("STAGELINE_KEY_PASSPHRASE_FILE", str(tmp_path / "passphrase"))
    made = shown("keys new --encrypt", capsys)
    assert made["encrypted"] is True
    monkeypatch.setenv("STAGELINE_KEY_PASSPHRASE_FILE", str(tmp_path / "gone"))
    assert shown("keys show", capsys) == made
    assert run(["keys", "rotate"]) == ExitCode.REFUSED
    assert str(tmp_path / "gone") in capsys.readouterr().err


def test_a_key_is_rotated_and_the_one_of_before_is_kept_until_it_is_deleted(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shown("keys new", capsys)
    text = (config / "own.key").read_text()
    found = shown("keys rotate", capsys)
    assert (found["former"], found["confirmed"]) == (first["key"], [])
    assert (config / "own.key.former").read_text() == text
    assert any(f"keys admit {found['key']}" in each for each in found["next"])
    assert any(f'next_key = "{found["key"]}"' in each for each in found["next"])  # no order admits a party's key
    assert shown("keys show", capsys)["key"] == found["key"] != first["key"]
    assert run(["keys", "rotate"]) == ExitCode.FAILED
    assert str(config / "own.key.former") in capsys.readouterr().err
    (config / "own.key.former").unlink()
    assert run(["keys", "rotate"]) == ExitCode.OK
    assert sorted(each.name for each in config.iterdir()) == ["own.key", "own.key.former"]


def test_a_rotation_that_a_broker_does_not_confirm_leaves_the_key_and_goes_on_later(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stageline.workers.cli.key_commands._PATIENCE", 0.0)
    first, other = shown("keys new", capsys), shown("keys new hospital", capsys)
    for _ in range(2):
        assert run(["keys", "rotate", "--broker", f"tcp://127.0.0.1:9#{other['key']}"]) == ExitCode.NO_BROKER
        assert "0 of 1 brokers have confirmed" in capsys.readouterr().err
        assert shown("keys show", capsys)["key"] == first["key"]
    following = (config / "own.key.next").read_text()
    assert shown("keys rotate", capsys)["key"] in following
    assert (config / "own.key").read_text() == following


def test_the_key_of_before_is_kept_also_when_brokers_have_confirmed_the_other(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brokers of its own user took no order any more: the only copy of their key was replaced."""
    monkeypatch.setattr("stageline.workers.cli.key_commands.succeed", lambda *_: None)
    shown("keys new", capsys)
    other, text = shown("keys new hospital", capsys), (config / "own.key").read_text()
    found = shown(f"keys rotate --broker tcp://127.0.0.1:9#{other['key']}", capsys)
    assert (found["kept"], len(found["confirmed"])) == (str(config / "own.key.former"), 1)
    assert (config / "own.key.former").read_text() == text != (config / "own.key").read_text()
    assert found["next"][-1].endswith(f"rm {config / 'own.key.former'}")


def test_a_link_to_a_key_file_stays_a_link(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The link was replaced: the file to which it led went on with the key of before."""
    first = shown("keys new", capsys)
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    (config / "own.key").rename(kept / "mine.key")
    (config / "own.key").symlink_to(kept / "mine.key")
    found = shown("keys rotate", capsys)
    assert (config / "own.key").readlink() == kept / "mine.key"
    assert shown("keys show", capsys)["key"] == found["key"] != first["key"]
    assert found["kept"] == str(kept / "mine.key.former")
    assert sorted(each.name for each in kept.iterdir()) == ["mine.key", "mine.key.former"]


def test_a_broker_that_is_known_by_the_key_takes_no_other_while_it_runs(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shown("keys new", capsys)
    assert run(["keys", "rotate", "--broker", f"tcp://127.0.0.1:9#{first['key']}"]) == ExitCode.REFUSED
    assert "is known by this key" in capsys.readouterr().err
    assert [each.name for each in config.iterdir()] == ["own.key"]
