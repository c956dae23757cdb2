"""Encrypted key files: a passphrase opens them, and what is wrong with one is said before it costs anything."""

import base64
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from stageline.broker.keys.pairs import KeyPair
from stageline.workers.keys import locked_key
from stageline.workers.keys.key_file import new_pair, read_pair, stored_key
from stageline.workers.keys.keyring import own_pair
from stageline.workers.keys.locked_key import PREFIX, LockedKey
from stageline.workers.keys.passphrase import VARIABLE, KeyLocked, new_passphrase
from stageline.workers.keys.private_file import KeyUnusable

PASSPHRASE = "correct horse battery"  # noqa: S105


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_key, "COST", (14, 1, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own.key"


def said_in(folder: Path, text: str, mode: int = 0o600, name: str = "passphrase") -> dict[str, str]:
    """The environment of a process whose passphrase is in a file."""
    (folder / name).write_text(text)
    (folder / name).chmod(mode)
    return {VARIABLE: str(folder / name), "STAGELINE_KEY_FILE": str(folder / "own.key")}


def refusal(path: Path, environment: dict[str, str]) -> str:
    with pytest.raises(KeyUnusable) as raised:
        read_pair(path, environment)
    assert str(path) in str(raised.value) or environment[VARIABLE] in str(raised.value)
    return str(raised.value)


def altered(path: Path, place: int, value: int) -> None:
    """Put another byte into what the key file has in base64url."""
    start, signs = path.read_text().split(PREFIX)
    raw = bytearray(base64.urlsafe_b64decode(signs.strip() + "=="))
    raw[place] = value
    path.write_text(f"{start}{PREFIX}{base64.urlsafe_b64encode(raw).rstrip(b'=').decode()}\n")


def test_an_encrypted_key_is_read_with_its_passphrase_alone(path: Path, tmp_path: Path) -> None:
    pair = new_pair(path, PASSPHRASE.encode())
    assert pair.secret not in base64.urlsafe_b64decode(path.read_text().split(PREFIX)[1].strip() + "==")
    for end in ("", "\n", "\r\n"):
        assert own_pair(said_in(tmp_path, PASSPHRASE + end, name=f"passphrase-{len(end)}")) == pair
    told = refusal(path, said_in(tmp_path, "another one"))
    assert "does not open" in told
    assert "another one" not in told.replace("it is another one", "")
    found = stored_key(path)
    assert isinstance(found, LockedKey)
    assert found.public == pair.public  # without the passphrase
    assert pair.public.text in path.read_text()


def test_two_files_of_one_passphrase_have_nothing_in_common(path: Path, tmp_path: Path) -> None:
    pair, passphrase = KeyPair.generate(), PASSPHRASE.encode()
    first, second = LockedKey.lock(pair, passphrase), LockedKey.lock(pair, passphrase)
    assert first.salt != second.salt
    assert first.sealed != second.sealed
    assert first.open(passphrase) == second.open(passphrase) == pair


@pytest.mark.parametrize("place", [3, 20, 51, 98], ids=["salt", "public key", "secret", "tag"])
def test_a_file_that_was_changed_does_not_open(path: Path, tmp_path: Path, place: int) -> None:
    new_pair(path, PASSPHRASE.encode())
    raw = base64.urlsafe_b64decode(path.read_text().split(PREFIX)[1].strip() + "==")
    altered(path, place, raw[place] ^ 1)
    assert "does not open" in refusal(path, said_in(tmp_path, PASSPHRASE))


def test_a_file_that_is_cut_off_or_mistyped_says_so(path: Path, tmp_path: Path) -> None:
    new_pair(path, PASSPHRASE.encode())
    text, environment = path.read_text(), said_in(tmp_path, PASSPHRASE)
    path.write_text(text[:-20])
    assert "is cut off: it has 113 characters after k1-encrypted., expected 132" in refusal(path, environment)
    path.write_text(text[:-20] + "!" * 19)
    assert "is not base64url" in refusal(path, environment)
    path.write_text(text + text)
    assert "is no key file" in refusal(path, environment)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, 255, "MiB of memory"),
        (0, 30, "asks for 131072 MiB of memory (n = 2^30, r = 1), of which it gets 256 at most"),
        (0, 13, "parameters of scrypt that are none: n = 2^13"),
        (1, 255, "MiB of memory"),
        (1, 0, "r = 0"),
        (2, 0, "p = 0"),
        (2, 255, "p = 255"),
    ],
)
def test_parameters_that_would_take_the_machines_memory_are_refused_before_any_is_allocated(
    path: Path, tmp_path: Path, place: int, value: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_pair(path, PASSPHRASE.encode())
    altered(path, place, value)
    monkeypatch.setattr(LockedKey, "_key", lambda *_: pytest.fail("it was tried"))
    assert said in refusal(path, said_in(tmp_path, PASSPHRASE))


def test_a_file_with_a_passphrase_is_this_users_alone_and_has_one_line(path: Path, tmp_path: Path) -> None:
    new_pair(path, PASSPHRASE.encode())
    shown = tmp_path / "passphrase"
    assert f"Run: chmod 600 {shown}" in refusal(path, said_in(tmp_path, PASSPHRASE, 0o644))
    for text in ("", "\n", "a\nb\n", 1025 * "a"):
        assert "expected one line of 1 to 1024 bytes" in refusal(path, said_in(tmp_path, text))
    shown.unlink()
    with pytest.raises(KeyLocked, match=f"there is no file {shown}"):
        read_pair(path, {VARIABLE: str(shown)})


def test_a_new_passphrase_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyLocked, match="has 7 bytes, expected 8 at least"):
        new_passphrase("own.key", said_in(tmp_path, "1234567"))
    assert new_passphrase("own.key", said_in(tmp_path, "12345678\n")) == b"12345678"


COMMAND = [sys.executable, "-P", "-m", "stageline", "keys"]


def asked(words: list[str], folder: Path, *typed: str) -> tuple[int, str]:
    """The exit code of a command at a terminal, on which this is typed at each question, and what it shows."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "STAGELINE_KEY_FILE": str(folder / "own.key")}
    program = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    program += "os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", program, *COMMAND, *words]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = ""
        for number, each in enumerate(typed, start=1):
            while shown.count(": ") < number:
                shown += os.read(ours, 4096).decode()
            os.write(ours, f"{each}\n".encode())
        try:
            while found := os.read(ours, 4096):
                shown += found.decode()
        except OSError:  # EIO: the other side is closed
            pass
        os.close(ours)
        return process.wait(60), shown


@pytest.mark.slow
def test_at_a_terminal_the_passphrase_is_asked_for_and_not_shown(path: Path, tmp_path: Path) -> None:
    code, shown = asked(["new", "--encrypt"], tmp_path, PASSPHRASE, PASSPHRASE)
    assert (code, PASSPHRASE in shown) == (0, False)
    assert "encrypted" in shown
    pair = read_pair(path, said_in(tmp_path, PASSPHRASE))
    assert pair.public.text in shown
    code, shown = asked(["rotate"], tmp_path, PASSPHRASE, "a longer one", "a longer one")
    assert code == 0
    assert read_pair(path, said_in(tmp_path, "a longer one", name="another")).public.text in shown


def test_without_a_terminal_it_says_where_the_passphrase_may_be(path: Path, tmp_path: Path) -> None:
    new_pair(path, PASSPHRASE.encode())
    environment = {**os.environ, "STAGELINE_KEY_FILE": str(path)}
    command = [*COMMAND, "rotate"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
    )
    assert done.returncode == KeyLocked.exit_code
    assert f"set {VARIABLE} to the path" in done.stderr
    assert "[SL608]" in done.stderr
