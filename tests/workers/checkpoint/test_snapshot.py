"""A snapshot on disk brings everything back; any damage to its files is found and named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.checkpoint.snapshot import (
    AVERAGES,
    FILES,
    MANIFEST,
    TRAINING,
    WEIGHTS,
    Origin,
    Snapshot,
    SnapshotDamaged,
    file_record,
    problems,
    read_manifest,
    read_snapshot,
    write_manifest,
    write_snapshot,
)
from stageline.workers.disk.tensor_file import Unsaveable
from stageline.workers.runtime.calls import Position
from support.states import difference, make_state

ORIGIN = Origin("digits-1", "5fa0" * 16)
SNAPSHOT = Snapshot(2, 120, 7, make_state(), {0: 2.5, 10: None, 119: 0.1}, calls=130, evaluations=9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_snapshot(tmp_path, SNAPSHOT, ORIGIN)
    return tmp_path


def found(folder: Path) -> list[str]:
    return problems(folder, 2, 120, ORIGIN)


def test_all_comes_back_as_it_was(folder):
    assert found(folder) == []
    back = read_snapshot(folder, 2, 120, ORIGIN)
    assert not difference(back.state, SNAPSHOT.state)
    assert back.losses == SNAPSHOT.losses
    assert (back.stage, back.step, back.incarnation) == (2, 120, 7)


def test_a_stage_without_parameters_has_a_snapshot_too(tmp_path):
    write_snapshot(tmp_path, replace(SNAPSHOT, state=StageState({})), ORIGIN)
    assert read_snapshot(tmp_path, 2, 120, ORIGIN).state == StageState({})
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, MANIFEST}  # no averages, no file


def test_the_weights_can_be_used_without_stageline(folder):
    weights = load_file(folder / WEIGHTS)
    assert weights.keys() == SNAPSHOT.state.weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in SNAPSHOT.state.weights.items())


def test_the_manifest_holds_where_the_snapshot_is_from(folder):
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes())
    assert {key: manifest[key] for key in ("format", "run", "plan", "stage", "step", "incarnation", "torch")} == {
        "format": "snapshot/5",
        "run": "digits-1",
        "plan": "5fa0" * 16,
        "stage": 2,
        "step": 120,
        "incarnation": 7,
        "torch": torch.__version__,
    }
    assert manifest["training"]["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert manifest["losses"] == {"0": 2.5, "10": None, "119": 0.1}
    assert (manifest["calls"], manifest["evaluations"]) == (130, 9)
    assert read_manifest(folder).position == SNAPSHOT.position == Position(120, 130, 9)


def test_the_same_state_makes_the_same_files(tmp_path):
    manifests = []
    for name in "ab":
        (tmp_path / name).mkdir()
        manifests.append(write_snapshot(tmp_path / name, SNAPSHOT, ORIGIN))
    assert manifests[0].same_state(manifests[1])
    other = replace(SNAPSHOT, state=make_state(1))
    (tmp_path / "c").mkdir()
    assert not manifests[0].same_state(write_snapshot(tmp_path / "c", other, ORIGIN))
    (tmp_path / "d").mkdir()
    assert not manifests[0].same_state(write_snapshot(tmp_path / "d", replace(SNAPSHOT, calls=131), ORIGIN))


@pytest.mark.parametrize("odd", [torch.eye(2).to_sparse(), object()])
def test_what_cannot_be_stored_is_refused_and_not_left_out(tmp_path, odd):
    state = replace(SNAPSHOT.state, optimizer={"state": {0: {"odd": odd}}, "param_groups": []})
    with pytest.raises(Unsaveable, match=r"optimizer\.state\.0\.odd"):
        write_snapshot(tmp_path, replace(SNAPSHOT, state=state), ORIGIN)


@given(
    name=st.sampled_from([*FILES, AVERAGES, MANIFEST]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7)
)
def test_a_flipped_bit_anywhere_is_found(folder_of_module, name, place, bit):
    path = folder_of_module / name
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(place * len(whole))] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        [problem] = found(folder_of_module)
        assert name in problem or "is of format" in problem
        with pytest.raises(SnapshotDamaged, match=str(folder_of_module)):
            read_snapshot(folder_of_module, 2, 120, ORIGIN)
    finally:
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def folder_of_module(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("snapshot")
    write_snapshot(folder, SNAPSHOT, ORIGIN)
    return folder


@given(name=st.sampled_from([*FILES, AVERAGES, MANIFEST]), length=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_found(folder_of_module, name, length):
    path = folder_of_module / name
    whole = path.read_bytes()
    path.write_bytes(whole[: int(length * len(whole))])
    try:
        [problem] = found(folder_of_module)
        assert name in problem
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", [*FILES, AVERAGES, MANIFEST])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert found(folder) == [f"{name} is missing"]


@pytest.mark.parametrize("name", [*FILES, AVERAGES, MANIFEST])
def test_a_file_that_cannot_be_read_is_named(folder, name):
    # A folder in its place cannot be read, by root neither.
    size = (folder / name).stat().st_size
    (folder / name).unlink()
    (folder / name).mkdir()
    [problem] = found(folder)
    assert name in problem
    assert "Is a directory" in problem or f"were {size}" in problem or "written were" in problem


def test_everything_that_is_wrong_is_reported_at_once(folder):
    (folder / WEIGHTS).unlink()
    (folder / TRAINING).write_bytes(b"")
    assert [problem.partition(" ")[0] for problem in found(folder)] == [WEIGHTS, TRAINING]


@pytest.mark.parametrize(
    ("stage", "step", "origin", "words"),
    [
        (1, 120, ORIGIN, "it is of stage 2, step 120"),
        (2, 140, ORIGIN, "it is of stage 2, step 120"),
        (2, 120, replace(ORIGIN, run="digits-2"), "it is of run digits-1, not of digits-2"),
        (2, 120, replace(ORIGIN, plan="c0de" * 16), r"another plan \(digest 5fa05fa05fa0, this one's is c0dec0dec0de"),
    ],
)
def test_a_snapshot_of_another_place_run_or_plan_is_refused(folder, stage, step, origin, words):
    with pytest.raises(SnapshotDamaged, match=words):
        read_snapshot(folder, stage, step, origin)


def rewritten(folder: Path, change: Callable[[dict], None]) -> None:
    """Changes the manifest and its checksum, as a program that knows the format could."""
    fields = msgspec.structs.asdict(read_manifest(folder))
    change(fields)
    write_manifest(folder, type(read_manifest(folder))(**fields | {"sha256": "0" * 64}))


FORGERIES = {
    "the files": lambda fields: fields["files"].update({"../../../etc/passwd": fields["files"][WEIGHTS]}),
    "is of format 'snapshot/9'": lambda fields: fields.update(format="snapshot/9"),
    "is no encoded value": lambda fields: fields["training"].update(optimizer={"$call": "os.abort"}),
    "unexpected keyword": lambda fields: fields["training"].update(surprise=1),
    "contents are not": lambda fields: fields["training"].update(in_flight=7),
}


@pytest.mark.parametrize("words", FORGERIES)
def test_a_forged_manifest_is_refused_with_the_reason(folder, words):
    rewritten(folder, FORGERIES[words])
    with pytest.raises(SnapshotDamaged, match=words):
        read_snapshot(folder, 2, 120, ORIGIN)


@pytest.mark.parametrize(
    "metadata",
    ['{"3.weight": {"strides": [1]}}', '{"3.weight": {"skew": "odd"}}', "[" * 100_000, "no JSON"],
    ids=range(4),
)
def test_forged_notes_on_tensors_are_refused_with_the_reason(folder, metadata):
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, {"stageline": metadata})
    rewritten(folder, lambda fields: fields["files"].update({WEIGHTS: file_record(folder / WEIGHTS)}))
    with pytest.raises(SnapshotDamaged, match="its checksums are right"):
        read_snapshot(folder, 2, 120, ORIGIN)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"format": "snapshot/5"}',
        b"\xff\xfe",
        b'{"format": "snapshot/5", "x": ' + b"[" * 100_000,
    ],
    ids=range(7),
)
def test_a_manifest_that_is_not_one_is_refused_with_the_reason(folder, content):
    (folder / MANIFEST).write_bytes(content)
    [problem] = found(folder)
    assert problem.startswith(f"{MANIFEST} is damaged")
