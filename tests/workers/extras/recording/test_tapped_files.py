"""Names of files, and what they say."""

from pathlib import Path

import torch

from stageline.workers.extras.recording.tapped_files import TapPlace, named_tensors, place_of


def test_a_place_is_found_again_by_the_name_of_its_file() -> None:
    for place in (TapPlace(False, 120, 3), TapPlace(True, 0, 11)):
        assert place_of(Path("taps/stage-2") / place.file) == place
    assert TapPlace(False, 120, 3).file == "step-120-3.safetensors"
    assert str(TapPlace(True, 4, 1)) == "microbatch 1 of evaluated batch 4"


def test_drafts_and_other_files_are_of_no_place() -> None:
    for name in (".step-1-2.safetensors-5fa0c1d2", "step-1.safetensors", "about.json", "step-1-2.safetensors.old"):
        assert place_of(Path(name)) is None


def test_places_are_ordered_by_number_and_training_comes_first() -> None:
    ordered = [TapPlace(False, 9, 1), TapPlace(False, 10, 0), TapPlace(True, 0, 0)]
    assert sorted(ordered[i] for i in (2, 0, 1)) == ordered


def test_tensors_are_named_by_their_places() -> None:
    one = torch.ones(1)
    assert [*named_tensors("a.b", one)] == ["a.b"]
    assert [*named_tensors("a.b", (one, {"mask": one, "length": 3}, None))] == ["a.b[0]", "a.b[1]['mask']"]
