"""`stageline probe` prints a table, JSON and a file, and refuses what cannot be probed."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from stageline.workers.cli.app import run
from stageline.workers.disk.tensor_file import write_tensors
from stageline.workers.extras.recording.tapped_files import TapLayer, TapPlace, TapsAbout
from support.answers import conforming


@pytest.fixture
def tapped(tmp_path: Path) -> Path:
    """A run of layers "a", which returns noise, and "b", which returns the class."""
    layers = (TapLayer("a", 0), TapLayer("b", 0))
    classes = torch.randint(2, (100,), generator=torch.Generator().manual_seed(1))
    noise = torch.randn(100, 4, generator=torch.Generator().manual_seed(2))
    content = {
        "samples": {"samples": torch.arange(100), "targets": classes},
        "stage-0": {"a": noise, "b": noise + 9 * classes[:, None]},
    }
    for folder, tensors in content.items():
        (tmp_path / "run" / "taps" / folder).mkdir(parents=True)
        write_tensors(tmp_path / "run" / "taps" / folder / TapPlace(False, 0, 0).file, tensors)
    about = TapsAbout(layers=layers, every=1, evaluation=False, microbatches=1)
    (tmp_path / "run" / "taps" / "about.json").write_bytes(msgspec.json.encode(about))
    return tmp_path / "run"


def test_a_table_has_a_line_for_each_layer_and_names_the_best(tapped: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(["probe", str(tapped)]) == 0
    printed = capsys.readouterr()
    title, heads, *rows, last = printed.out.splitlines()
    assert (title, heads.split()) == ("probes", ["layer", "features", "l2", "accuracy", "baseline"])
    assert [row.split()[0] for row in rows] == ["a", "b"]
    assert last.endswith("2 classes; best: layer b, accuracy 1.000")
    assert "rows of training of 100 samples: " in last
    assert "rows to test on are few" in printed.err


def test_the_result_is_printed_as_json_and_written_to_a_file(tapped: Path, capsys: pytest.CaptureFixture) -> None:
    out = tapped / "probe.json"
    assert run(["probe", str(tapped), "--layers", "b", "--json", "--out", str(out)]) == 0
    report = conforming(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert (report["schema"], report["run"], report["score"], report["classes"]) == ("probe/1", "run", "accuracy", 2)
    [layer] = report["layers"]
    assert layer.keys() == {"layer", "features", "l2", "score", "baseline"}
    assert (layer["layer"], layer["score"]) == ("b", 1.0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere"], 2, "there is no folder nowhere: name the folder of a run whose plan has [taps]"),
        (["--layers", "c"], 2, 'no tapped layer matches "c"; there are a, b'),
        (["--rows", "evaluation"], 2, "taps.evaluation is off"),
        (["--target", "label"], 1, '--target "label" is none of them'),
        (["--pool", "max"], 2, "max"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    arguments: list[str], code: int, said: str, tapped: Path, capsys: pytest.CaptureFixture
) -> None:
    where = [] if arguments == ["nowhere"] else [str(tapped)]
    assert run(["probe", *where, *arguments, "--json"]) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert conforming(printed.out)["schema"] == "error/1"
