"""A bundle of a run: what is in it, and no secret from any place where one can be."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import bundle as bundling
from stageline.workers.cli.app import run
from stageline.workers.cli.bundle import collect
from stageline.workers.cli.bundle_archive import MANIFEST, BundleManifest, write_bundle
from stageline.workers.runs.logs import stamped

PLANTED = {  # by the place where it is
    "key file": "pl4nted-key-file-1111",
    "control secret": "ab" * 32,
    "password in an address of the plan": "pl4nted-url-2222",
    "another in the environment": "pl4nted-url-3333",
    "variable": "pl4nted-variable-4444",
    "argument of the model": "pl4nted-argument-5555",
    "argument with a name of a secret": "pl4nted-named-6666",
    "print in a log": "pl4nted-print-7777",
    "event in a log": "pl4nted-event-8888",
    "row in an error": "pl4nted-row-9999",
    "line of code in a stack": "pl4nted-code-0000",
    "key of a join line": "pl4nted-join-1212",
    "line of code in a traceback": "pl4nted-trace-1313",
}
LOG = f"""\
{stamped(1e9, "joined")}: worker --join 'tcp://desk:7000#k1.abc:{PLANTED["key of a join line"]}'
the row is {PLANTED["print in a log"]}
{stamped(1e9, "asked")}: token={PLANTED["event in a log"]}, {PLANTED["variable"]}
Traceback (most recent call last):
  File "data.py", line 3, in batches
    read("{PLANTED["line of code in a traceback"]}")
ValueError: could not convert string to float: '{PLANTED["row in an error"]}'
stageline: stage 0 failed
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's, with secrets in all places."""
    key = tmp_path / "own.key"
    key.write_text(f"# Its public key is k1.abc\n{PLANTED['key file']}\n")
    monkeypatch.setenv("STAGELINE_KEY_FILE", str(key))
    monkeypatch.setenv("WANDB_API_KEY", PLANTED["variable"])
    monkeypatch.setenv("STAGELINE_BROKER__STORE", f"redis://a:{PLANTED['another in the environment']}@desk/0")
    found = tmp_path / "digits-1"
    found.mkdir()
    plan = {
        "run": {"name": "digits", "steps": 6},
        "queues": {"url": f"redis://anna:{PLANTED['password in an address of the plan']}@desk:6379/0"},
        "model": {
            "factory": "model.py:build",
            "options": {"path": PLANTED["argument of the model"], "width": 8},
        },
        "optimizer": {"factory": "torch.optim.SGD", "hub_token": PLANTED["argument with a name of a secret"]},
    }
    (found / "plan.json").write_text(json.dumps(plan))
    (found / "broker.secret").write_text(PLANTED["control secret"])
    (found / "worker-0.log").write_text(LOG)
    (found / "weights.safetensors").write_bytes(b"weights")
    return found


def ask(query: str, **of: str) -> dict[str, Any]:
    """As a broker answers that knows all secrets."""
    everything = " ".join(PLANTED[each] for each in ("key file", "control secret", "variable"))
    if query == "status":
        losses = {str(step): 0.5 for step in range(5000)}
        return {"workers": [{"index": 0}], "losses": losses, "keys": {"knocks": ["k1.abc"]}, "said": everything}
    if query == "stack":
        frame = {"file": "data.py", "line": 3, "function": "batches", "text": PLANTED["line of code in a stack"]}
        thread = {"thread": "main", "left_out": 0, "frames": [frame]}
        return {"workers": [{"worker": 0, "name": "w", "missing": "", "threads": [thread]}]}
    if query == "history":
        raise ValueError(f"it is refused: {everything}")
    error = f"stage 0 failed: ValueError: bad cell '{PLANTED['row in an error']}'"
    return {"text": error, "address": f"redis://a:{PLANTED['another in the environment']}@desk/0", "all": everything}


def test_no_secret_is_in_a_bundle_wherever_it_was_and_what_tells_of_the_fault_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundling, "_findings", list)
    manifest, files = collect(folder, ask, "")
    assert write_bundle(tmp_path / "a.zip", manifest, files) < 100_000
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    found = {(place, name) for name, text in texts.items() for place, secret in PLANTED.items() if secret in text}
    assert not found
    assert set(texts) == {
        MANIFEST,
        *("plan.json", "doctor.json", "status.json", "why.json", "queues.json", "microbatches.json"),
        *("timetable.json", "stack.json", "logs/worker-0.log"),
    }
    assert json.loads(texts["plan.json"])["model"] == {
        "factory": "model.py:build",
        "options": {"path": "<text of 21 characters>", "width": 8},
    }
    assert json.loads(texts["plan.json"])["optimizer"] == {"factory": "torch.optim.SGD", "hub_token": "[left out]"}
    assert json.loads(texts["plan.json"])["queues"] == {"url": "redis://anna@desk:6379/0"}
    assert json.loads(texts["why.json"])["text"].startswith("stage 0 failed: ValueError: bad cell ")
    status = json.loads(texts["status.json"])
    assert (len(status["losses"]), status["keys"]) == (1000, None)
    assert texts["logs/worker-0.log"].splitlines()[-2:] == [
        "ValueError: could not convert string to float: [left out]",
        "stageline: stage 0 failed",
    ]
    (refused,) = manifest.left_out
    assert refused.startswith("history.json: it is refused")


def test_files_are_left_out_once_there_is_no_room_and_the_reason_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundling, "_findings", list)
    monkeypatch.setattr(bundling, "LARGEST", 300)
    manifest, files = collect(folder, ask, "")
    assert "status.json" not in files
    assert any(each.startswith("status.json: there is no room") for each in manifest.left_out)
    assert all(len(content) <= 300 for content in files.values())


@pytest.mark.parametrize("words", [["digits"], ["--keys"], ["--set", "run.steps=1"], ["--broker", "tcp://desk:1"]])
def test_a_bundle_is_read_alone(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--from", str(tmp_path), *words]) == ExitCode.USAGE
    assert "--from reads a bundle alone" in capsys.readouterr().err


STATUS: dict[str, Any] = {
    **dict.fromkeys(("plan", "script", "reason", "code", "weights_sha256", "training_steps", "last_loss", "keys")),
    **dict.fromkeys(("finished_loss", "last_evaluation", "best", "stopped_early", "checkpoint")),
    "run": "a",
    "name": "a",
    "phase": "training",
    "listening": False,
    "recollecting": False,
    "restarts": 0,
    **{each: [] for each in ("missing", "finished", "evaluations", "damaged", "recovering", "spares", "workers")},
    "finished_floor": 0,
    "losses": {},
    "metrics": {},
    "oddities": {},
}
WHY: dict[str, Any] = {
    "run": "a",
    "phase": "training",
    "text": "it trains",
    "action": "nothing",
    "slow": None,
    "root": None,
    "chain": [],
    "reports": [],
}


def hostile(path: Path, wrong: Mapping[str, Any]) -> Path:
    """A bundle with answers of the right form."""
    manifest = BundleManifest(version="0", made=1.0, run="a", source="broker", state="", files=[], left_out=[])
    answers = {"plan.json": {}, "status.json": STATUS, "why.json": WHY}
    files = {name: json.dumps({**answer, **wrong.get(name, {})}).encode() for name, answer in answers.items()}
    write_bundle(path, manifest, files)
    return path


def test_answers_of_the_right_form_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--from", str(hostile(tmp_path / "a.zip", {}))]) == ExitCode.OK
    assert "it trains" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("status.json", {"result": {"steps": "many"}}),
        ("status.json", {"metrics": {"accuracy": "high"}}),
        ("status.json", {"keys": {"a": 1}}),
        ("status.json", {"orders": {"a": 1}}),
        ("plan.json", {"a": json.loads("[" * 900 + "]" * 900)}),
        ("plan.json", {"a": json.loads('{"a":' * 900 + "1" + "}" * 900)}),
    ],
)
def test_answers_that_nobody_gave_end_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, wrong: dict[str, Any]
) -> None:
    assert run(["doctor", "--from", str(hostile(tmp_path / "a.zip", {name: wrong}))]) == ExitCode.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("[SL415]")


def test_what_is_no_bundle_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.zip").write_bytes(b"no archive")
    assert run(["doctor", "--from", str(tmp_path / "a.zip")]) == ExitCode.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert "is no bundle of a run" in line
    assert run(["doctor", "--from", str(tmp_path / "b.zip")]) == ExitCode.FAILED
    assert "b.zip" in capsys.readouterr().err
