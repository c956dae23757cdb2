"""`stageline keys`: a key is made, shown, and never replaced; its secret is printed nowhere."""

import json
from pathlib import Path

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.app import run


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("STAGELINE_KEY_FILE", raising=False)
    return tmp_path / "stageline" / "keys"


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert run([*words.split(), "--json"]) == ExitCode.OK
    return json.loads(capsys.readouterr().out)


def test_a_key_that_is_made_is_shown_again_and_its_secret_is_not(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = shown("keys new", capsys)
    assert made == {"schema": "key/1", "key": made["key"], "file": str(config / "own.key")}
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
