"""A file is there whole or not at all, and only once it is on the disk."""

import os
import stat
from pathlib import Path

import pytest

from stageline.workers.disk.atomic_file import create_file, make_folder, remove_folder, write_file, write_json


def test_a_file_takes_the_place_of_the_older_one_and_leaves_no_draft(tmp_path):
    for content in (b"old", b"new"):
        write_file(tmp_path / "a" / "b" / "file", content)
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"new"
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_a_failed_write_changes_nothing(tmp_path, monkeypatch):
    write_file(tmp_path / "file", b"old")

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_file(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition("-")[0])

    def noted_replace(path: Path, target: Path) -> Path:
        events.append("renamed")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_file(tmp_path / "new" / "file", b"content")
    assert events == [tmp_path.name.partition("-")[0], ".file", "renamed", "new"]


def test_a_private_file_is_never_readable_for_others(tmp_path):
    write_file(tmp_path / "file", b"secret", mode=0o600)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_json_is_indented_and_ends_its_last_line(tmp_path):
    write_json(tmp_path / "file.json", {"a": [1]})
    assert (tmp_path / "file.json").read_text() == '{\n  "a": [\n    1\n  ]\n}\n'


def test_a_folder_is_made_and_removed_as_a_whole(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "file").write_text("")
    remove_folder(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        remove_folder(tmp_path / "a")


def test_a_file_is_created_unless_there_is_one(tmp_path):
    create_file(tmp_path / "a" / "file", b"first", mode=0o600)
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "a" / "file", b"second")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "a").iterdir()] == [("file", b"first")]
    assert stat.S_IMODE((tmp_path / "a" / "file").stat().st_mode) == 0o600
