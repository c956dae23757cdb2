"""A bundle is read without trust: nothing is unpacked before it was checked, and nothing is written to the disk."""

import stat
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from stageline.workers.cli import bundle_archive
from stageline.workers.cli.bundle_archive import (
    DEEPEST,
    LARGEST,
    MANIFEST,
    MOST_FILES,
    Bundle,
    BundledFile,
    BundleManifest,
    BundleUnreadable,
    is_name,
    write_bundle,
)

CONTENTS = BundleManifest(
    version="0", made=1.0, run="a", source="records", state="failed", files=[BundledFile("a.json", 2, "x")], left_out=[]
)


def packed(path: Path, files: Mapping[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    """As anybody could make it."""
    with zipfile.ZipFile(path, "w", how) as made:
        for name, content in {MANIFEST: msgspec.json.encode(CONTENTS), **files}.items():
            made.writestr(name, content)
    return path


def test_what_is_written_is_read_and_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    size = write_bundle(path, CONTENTS, {"a.json": b'{"b": 1}', "logs/worker-0.log": b"text"})
    assert size == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = Bundle(path)
    assert found.manifest == CONTENTS
    assert found.read("a.json", dict[str, int]) == {"b": 1}
    assert ("a.json" in found, "b.json" in found) == (True, False)
    with pytest.raises(FileExistsError):
        write_bundle(path, CONTENTS, {})


@pytest.mark.parametrize(
    "name",
    [
        "../a.json",
        "/etc/passwd",
        "logs/../../a",
        "a/b/a.json",
        "logs/",
        ".a.json",
        "a\\b",
        "C:a",
        "a\n.json",
        "x" * 200,
    ],
)
def test_a_file_whose_name_leads_elsewhere_makes_the_bundle_one_that_is_not_read(tmp_path: Path, name: str) -> None:
    assert not is_name(name)
    with pytest.raises(BundleUnreadable, match="is not to be trusted"):
        Bundle(packed(tmp_path / "a.zip", {name: b"{}"}))
    assert [each.name for each in tmp_path.iterdir()] == ["a.zip"]


def test_what_unpacks_to_too_much_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleUnreadable, match="would unpack to"):
        Bundle(packed(tmp_path / "a.zip", {"a.json": bytes(LARGEST + 1)}))
    with pytest.raises(BundleUnreadable, match=f"{MOST_FILES} at most"):
        Bundle(packed(tmp_path / "b.zip", {f"a{each}.json": b"" for each in range(MOST_FILES)}))
    monkeypatch.setattr(bundle_archive, "MOST", 2_000)
    with pytest.raises(BundleUnreadable, match="would unpack to 3"):
        Bundle(packed(tmp_path / "c.zip", {"a.json": bytes(1500), "b.json": bytes(1500)}))
    (tmp_path / "d.zip").write_bytes(bytes(3_000))
    with pytest.raises(BundleUnreadable, match="3000 bytes"):
        Bundle(tmp_path / "d.zip")


def test_a_file_that_is_larger_than_it_says_is_read_no_further(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"a.json": b" " * 100_000 + b"{}"})
    content = path.read_bytes()
    path.write_bytes(content.replace(struct.pack("<L", 100_002), struct.pack("<L", 10)))
    with pytest.raises(BundleUnreadable, match=r"damaged|not as large"):
        Bundle(path).read("a.json", dict)


def test_a_long_list_of_files_is_not_read(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {f"{each:090}": b"" for each in range(2000)})
    with pytest.raises(BundleUnreadable, match="its list of files"):
        Bundle(path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06", b"PK\x03\x04" + bytes(100), bytes(22)])
def test_what_is_no_archive_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(BundleUnreadable, match="is no bundle of a run"):
        Bundle(tmp_path / "a.zip")


def test_another_archive_is_said_to_be_none_and_damage_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("weights.json", "{}")
    with pytest.raises(BundleUnreadable, match=f"has no {MANIFEST}"):
        Bundle(tmp_path / "a.zip")
    path = packed(tmp_path / "b.zip", {"a.json": b'{"a": "bcdefgh"}'}, zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(b"bcdefgh", b"bcdEfgh"))
    with pytest.raises(BundleUnreadable, match=r"a\.json in .* is damaged"):
        Bundle(path).read("a.json", dict)
    two = {**dict.fromkeys(["a.json"], b"{}")}
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(packed(tmp_path / "c.zip", two), "a") as made:
        made.writestr("a.json", b"[]")
    with pytest.raises(BundleUnreadable, match="one name"):
        Bundle(tmp_path / "c.zip")


@pytest.mark.parametrize("made", [b"1e300", b"1e15", b"-1e15", b"-1"])
def test_a_time_that_no_bundle_was_made_at_is_an_error_that_names_the_file(tmp_path: Path, made: bytes) -> None:
    contents = msgspec.json.encode(CONTENTS).replace(b'"made":1.0', b'"made":' + made)
    with pytest.raises(BundleUnreadable, match=r"bundle\.json in .* cannot be read: .*made"):
        Bundle(packed(tmp_path / "a.zip", {MANIFEST: contents}))


@pytest.mark.parametrize(("depth", "is_read"), [(DEEPEST, True), (DEEPEST + 1, False), (900, False)])
def test_tables_in_one_another_are_bounded(tmp_path: Path, depth: int, is_read: bool) -> None:
    path = packed(tmp_path / "a.zip", {"plan.json": b'{"a":' * depth + b"1" + b"}" * depth})
    if is_read:
        assert Bundle(path).read("plan.json", dict)
        return
    with pytest.raises(BundleUnreadable, match=r"plan\.json in .* nested too deeply"):
        Bundle(path).read("plan.json", dict)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"a": "b"}', b"\xff", b"null"])
def test_what_is_no_answer_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BundleUnreadable, match=r"a\.json in .* cannot be read"):
        Bundle(packed(tmp_path / "a.zip", {"a.json": content})).read("a.json", BundleManifest)
