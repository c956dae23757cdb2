"""Tapped outputs are joined with their samples and checked; missing or damaged ones are named."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from stageline import NoTaps, TapsUnusable, read_taps
from stageline.workers.disk.tensor_file import write_tensors
from stageline.workers.extras.recording.tapped_files import TapLayer, TapPlace, TapsAbout

Content = Mapping[str, Tensor]


class StoredTaps:
    """A run's folder of two tapped layers on two stages, whose microbatches a test writes."""

    def __init__(self, run: Path, *, finished: bool = True) -> None:
        self.run, self.taps = run, run / "taps"
        layers = (TapLayer("body.0", 0), TapLayer("head", 2))
        for folder in ("samples", "stage-0", "stage-2"):
            (self.taps / folder).mkdir(parents=True)
        about = TapsAbout(layers=layers, every=2, evaluation=True, microbatches=2)
        (self.taps / "about.json").write_bytes(msgspec.json.encode(about))
        if finished:
            (run / "result.json").touch()

    def write(self, place: TapPlace, samples: Content, body: Content, head: Content) -> None:
        for folder, content in (("samples", samples), ("stage-0", body), ("stage-2", head)):
            write_tensors(self.taps / folder / place.file, content)

    def of_rows(self, place: TapPlace, *rows: int) -> None:
        """Row 3 of layer "body.0" is 30, 30."""
        numbers = torch.tensor(rows)
        known = {"samples": numbers, "targets": numbers % 2}
        self.write(place, known, {"body.0": 10.0 * numbers[:, None].expand(-1, 2)}, {"head": -1.0 * numbers})


@pytest.fixture
def stored(tmp_path: Path) -> StoredTaps:
    found = StoredTaps(tmp_path / "run")
    found.of_rows(TapPlace(False, 10, 0), 5, 6)
    found.of_rows(TapPlace(False, 2, 1), 3)
    found.of_rows(TapPlace(False, 2, 0), 1, 2)
    found.of_rows(TapPlace(True, 0, 0), 7, 8, 9)
    return found


def test_the_rows_of_a_layer_are_joined_in_the_order_of_steps(stored: StoredTaps) -> None:
    taps = read_taps(stored.run)
    assert (taps.layers, taps.every, taps.unwritten, taps.count()) == (("body.0", "head"), 2, 0, 3)
    read = taps.read("body.0")
    assert read.samples is not None
    assert read.samples.tolist() == [1, 2, 3, 5, 6]
    assert torch.equal(read.activations, 10.0 * read.samples[:, None].expand(-1, 2))
    assert torch.equal(read.targets, read.samples % 2)
    assert (read.steps.tolist(), read.microbatches.tolist()) == ([2, 2, 2, 10, 10], [0, 0, 1, 0, 0])
    assert taps.read("head", evaluation=True).activations.tolist() == [-7, -8, -9]
    assert repr(taps).endswith("run, 2 layers, 4 microbatches)")


def test_a_folder_without_taps_and_a_layer_that_is_not_there_are_named(stored: StoredTaps, tmp_path: Path) -> None:
    with pytest.raises(NoTaps, match=r"has no taps/about\.json: name the folder of a run whose plan has \[taps\]"):
        read_taps(tmp_path)
    with pytest.raises(NoTaps, match="there is no folder nowhere"):
        read_taps("nowhere")
    with pytest.raises(NoTaps, match=r"layer body\.1 was not tapped; body\.0, head were"):
        read_taps(stored.run).read("body.1")
    for path in stored.taps.rglob("evaluation-*"):
        path.unlink()
    with pytest.raises(NoTaps, match=r"nothing of layer head was stored there: .*taps\.evaluation is off"):
        read_taps(stored.run).read("head", evaluation=True)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "taps/2"}'])
def test_a_damaged_description_is_named(content: str, stored: StoredTaps) -> None:
    (stored.taps / "about.json").write_text(content)
    with pytest.raises(TapsUnusable, match=r"taps/about\.json is damaged: "):
        read_taps(stored.run)


@pytest.mark.parametrize("folder", ["samples", "stage-0", "stage-2"])
def test_a_file_that_is_missing_is_named(folder: str, stored: StoredTaps) -> None:
    (stored.taps / folder / "step-2-1.safetensors").unlink()
    with pytest.raises(TapsUnusable, match=rf"files are missing: .*taps/{folder}/step-2-1\.safetensors\. If workers"):
        read_taps(stored.run)


def test_the_folder_of_a_worker_on_another_machine_is_missed(stored: StoredTaps) -> None:
    for path in (stored.taps / "stage-2").iterdir():
        path.unlink()
    (stored.taps / "stage-2").rmdir()
    with pytest.raises(TapsUnusable, match=r"taps/stage-2 is not there: its worker has not begun, or ran on another"):
        read_taps(stored.run)
    (stored.taps / "stage-2").mkdir()
    with pytest.raises(TapsUnusable, match=r"files are missing: .*stage-2.* and 1 more\. If workers ran on other mach"):
        read_taps(stored.run)


def test_a_run_that_goes_on_is_read_as_far_as_all_have_written(tmp_path: Path) -> None:
    going = StoredTaps(tmp_path / "run", finished=False)
    going.of_rows(TapPlace(False, 0, 0), 1)
    going.of_rows(TapPlace(False, 2, 0), 2)
    (going.taps / "stage-2" / "step-2-0.safetensors").unlink()
    (going.taps / "stage-0" / ".step-4-0.safetensors-5fa0c1d2").touch()
    taps = read_taps(going.run)
    assert (taps.unwritten, taps.read("head").samples.tolist()) == (1, [1])


def test_a_bad_microbatch_that_was_left_out_is_no_missing_file(stored: StoredTaps) -> None:
    (stored.run / "skipped" / "stage-2").mkdir(parents=True)
    (stored.run / "skipped" / "stage-2" / "2-1").touch()
    (stored.taps / "stage-2" / "step-2-1.safetensors").unlink()
    assert read_taps(stored.run).read("body.0").samples.tolist() == [1, 2, 5, 6]


@pytest.mark.parametrize("folder", ["samples", "stage-0"])
def test_a_damaged_file_is_named_with_the_way_out(folder: str, stored: StoredTaps) -> None:
    path = stored.taps / folder / "step-2-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TapsUnusable, match=rf"{path} is damaged: .*the rest can be read"):
        read_taps(stored.run).read("body.0")


def test_a_file_of_another_run_is_named(stored: StoredTaps) -> None:
    path = stored.taps / "stage-0" / "step-2-1.safetensors"
    path.unlink()
    write_tensors(path, {"tail": torch.ones(1)})
    with pytest.raises(TapsUnusable, match=rf"{path} has nothing of layer body\.0"):
        read_taps(stored.run).read("body.0")


def test_tensors_that_do_not_count_rows_cannot_be_joined(tmp_path: Path) -> None:
    wide = StoredTaps(tmp_path / "run")
    wide.write(TapPlace(False, 0, 0), {"targets": torch.ones(2)}, {"body.0": torch.ones(3, 2)}, {"head": torch.ones(2)})
    with pytest.raises(TapsUnusable, match=r"a tensor of shape \[3, 2\] for a microbatch of 2 rows"):
        read_taps(wide.run).read("body.0")
    wide = StoredTaps(tmp_path / "other")
    known = {"targets": torch.ones(2), "samples": torch.arange(3)}
    wide.write(TapPlace(False, 0, 0), known, {"body.0": torch.ones(3, 2)}, {"head": torch.ones(2)})
    with pytest.raises(TapsUnusable, match=r"samples/step-0-0.safetensors has 3 and 2 rows"):
        read_taps(wide.run).read("body.0")


def test_a_layer_that_returns_a_tree_is_read_by_the_places_of_its_tensors(tmp_path: Path) -> None:
    """A table without rows is left out where rows are joined."""
    trees = StoredTaps(tmp_path / "run")
    for step, rows in ((0, 2), (2, 3)):
        body = {"body.0[0]": torch.ones(rows, 4), "body.0[1]['mask']": torch.zeros(rows), "body.0[2]": torch.ones(7)}
        known = {"targets['label']": torch.arange(rows), "targets['box']": torch.ones(rows, 4)}
        trees.write(TapPlace(False, step, 0), known, body, {"head": torch.ones(rows)})
    first = next(read_taps(trees.run).microbatches("body.0"))
    assert [*first.activations] == ["[0]", "[1]['mask']", "[2]"]
    read = read_taps(trees.run).read("body.0")
    assert {name: list(each.shape) for name, each in read.activations.items()} == {"[0]": [5, 4], "[1]['mask']": [5]}
    assert {name: list(each.shape) for name, each in read.targets.items()} == {"['box']": [5, 4], "['label']": [5]}
    assert read.samples is None


def test_sequences_of_different_lengths_are_read_one_by_one(tmp_path: Path) -> None:
    ragged = StoredTaps(tmp_path / "run")
    for step, length in ((0, 4), (2, 6)):
        tensors = {"targets": torch.ones(2)}, {"body.0": torch.ones(2, length, 3)}, {"head": torch.ones(2)}
        ragged.write(TapPlace(False, step, 0), *tensors)
    with pytest.raises(TapsUnusable, match=r"body\.0: shapes differ .*\[2, 4, 3\] and \[2, 6, 3\]; read them"):
        read_taps(ragged.run).read("body.0")
    assert [each.activations.shape[1] for each in read_taps(ragged.run).microbatches("body.0")] == [4, 6]


def test_what_is_described_is_json_that_others_can_read(stored: StoredTaps) -> None:
    about = json.loads((stored.taps / "about.json").read_text())
    assert about["schema"] == "taps/1"
    assert about["layers"] == [{"name": "body.0", "stage": 0}, {"name": "head", "stage": 2}]
