"""Words that a shell completes, in this process and in bash, and modules that are not imported for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stageline.pipeline.addresses import broker_schemes
from stageline.workers.cli.app import stageline
from stageline.workers.cli.completion import SHELLS, Bash, Zsh
from stageline.workers.runs import folder as runs
from support.workspace import PLAN

OLD, NEW = "small-20260131-101500-1f0c", "small-20260201-101500-77b1"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, another TOML file, a plan in a folder, and two runs of three stages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples/digits").mkdir(parents=True)
    (tmp_path / "examples/digits/stageline.toml").write_text(PLAN)
    (tmp_path / "mine.toml").write_text(PLAN)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'model'\n")
    for when, run in enumerate((OLD, NEW)):
        for stage in range(3):
            (tmp_path / f"runs/{run}/checkpoints/stage-{stage}/step-{20 * (when + 1):010d}").mkdir(parents=True)
        (plan := tmp_path / "runs" / run / runs.PLAN).write_text(json.dumps({"model": {"cut": [2, 4], "stages": 3}}))
        os.utime(plan, (when, when))
    return tmp_path


def completed(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what bash is given for a line that ends where the cursor is; "<files>" for its own files."""
    monkeypatch.setenv("COMP_WORDS", f"stageline {line}")
    said = Bash(stageline, {}, "stageline", "_STAGELINE_COMPLETE").complete()
    kinds = [each.partition(",") for each in said.splitlines()]
    return ["<files>" if kind == "file" else value for kind, _, value in kinds]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tra", ["trace", "train"]),
        ("checkpoint ver", ["verify"]),
        ("train --res", ["--resume"]),
        ("schedule show 1", ["1f1b"]),
        ("export ", [f"runs/{NEW}", f"runs/{OLD}"]),
        ("export runs/small-20260131", [f"runs/{OLD}"]),
        ("checkpoint ls ", [f"runs/{NEW}", f"runs/{OLD}"]),
        ("probe /data/x", ["<files>"]),
        ("status m", ["mine.toml"]),
        ("status runs/", [f"runs/{NEW}", f"runs/{OLD}"]),
        ("train ", ["mine.toml"]),
        ("train examples/", ["examples/digits"]),
        ("train exam", ["<files>"]),
        ("train nowhere/", ["<files>"]),
        ("predict runs/x --plan examples/d", ["examples/digits"]),
        ("train --resume ", [NEW, OLD]),
        ("broker --run small-20260201", [NEW]),
        ("why --stage ", ["0", "1", "2"]),
        ("why mine.toml --stage ", ["0", "1"]),
        (f"replay runs/{OLD} --stage 2", ["2"]),
        ("replay nowhere --stage ", []),
        (f"eval runs/{OLD} --step ", ["20"]),
        ("checkpoint verify --step ", ["40"]),
        ("worker --broker tc", ["tcp://"]),
        ("train --set mod", ["model."]),
        ("train --set model.fa", ["model.factory="]),
        ("train --set workers.0.dev", ["workers.0.device="]),
        ("train --set schedule.name=1f", ["1f1b"]),
        ("train --set=schedule.mode=a", ["async"]),
        ("train --set queues.url=sh", ["shm://"]),
        ("train --set nothing.at.all=", []),
    ],
)
def test_a_word_that_was_begun_becomes_what_is_there(
    line: str, words: list[str], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed(line, monkeypatch) == words


def test_every_scheme_of_a_brokers_address_is_offered_and_every_table_of_a_plan(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed("broker --bind ", monkeypatch) == [f"{scheme}://" for scheme in broker_schemes()]
    assert {"run.", "model.", "schedule.", "workers."} <= set(completed("plan --set ", monkeypatch))


@pytest.mark.parametrize(
    "line", ["tr", "schedule show 1", "export ", "why --stage ", "train ", "train --resume ", "train --set model."]
)
def test_no_completion_imports_torch(line: str, project: Path) -> None:
    environment = {**os.environ, "_STAGELINE_COMPLETE": "bash_complete", "COMP_WORDS": f"stageline {line}"}
    command = [sys.executable, "-P", "-X", "importtime", "-m", "stageline"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("plain,")
    imported = {each.rpartition("|")[2].strip() for each in ended.stderr.splitlines()}
    assert "stageline.workers.cli.completion" in imported
    assert "torch" not in imported


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("stageline train --set schedule.na", "schedule.name="),
        ("stageline train --set schedule.name=1f", "1f1b"),  # bash begins a word after =
        ("stageline worker --broker tcp", "tcp://"),
        (f"stageline export runs/{OLD[:14]}", f"runs/{OLD}"),
    ],
)
def test_the_function_that_bash_reads_replies_with_the_word_as_bash_cuts_it(
    line: str, reply: str, project: Path
) -> None:
    (program := project / "program").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m stageline "$@"\n')
    program.chmod(0o755)
    script = """
    eval "$(_STAGELINE_COMPLETE=bash_source "$0")"
    compopt() { :; }  # works during a completion alone
    COMP_LINE=$1 COMP_POINT=${#1}
    _stageline_completion "$0"
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    ended = subprocess.run(
        ["bash", "--norc", "-c", script, str(program), line], capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == (f"{reply}\n", "")


def test_the_functions_of_bash_and_zsh_put_no_space_after_a_word_that_goes_on() -> None:
    assert set(SHELLS) == {Bash, Zsh}
    assert "compopt -o nospace" in Bash.source_template
    assert "compadd -U -S ''" in Zsh.source_template  # in click's, found by its text
