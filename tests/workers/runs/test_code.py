"""The code of a script's run, in the run's folder."""

from hashlib import sha256
from pathlib import Path

from stageline.broker.coordinator.run import ScriptCode
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs.records import CODE, hashes_of, public_version, read_code


def test_what_is_written_is_read_and_nothing_is_there_before(tmp_path: Path) -> None:
    assert read_code(tmp_path) is None
    (tmp_path / "model.py").write_text("x")
    code = ScriptCode("2.13.0", hashes_of(tmp_path, ["model.py"]))
    persist_json(tmp_path / CODE, code)
    assert read_code(tmp_path) == code
    assert code.files == {"model.py": sha256(b"x").hexdigest()}


def test_the_build_of_torch_is_no_part_of_its_version() -> None:
    assert public_version("2.13.0+cu126") == public_version("2.13.0+cpu") == "2.13.0"
