"""`train --on-stall`: when a run has slowed down, and the command that is started at a stall."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.monitoring import stalls
from stageline.workers.cli.monitoring.stalls import BOUND, MINUTE, SlowedPace, Stall, StallCommand, StallKind
from support.workspace import Workspace, wait_for

STALLED = Stall(StallKind.STALLED, "silent", "stage 1 was silent for 5 s", "check process 7", 12)
SLOW = {
    "slow": {
        "text": "limited",
        "findings": [
            {"cause": "disk", "text": "workers wait for the disk", "remedies": [{"do": "snapshot less often"}]}
        ],
    }
}


def paced(rate: float, step: int) -> dict:
    return {"finished_floor": step, "pace": {"last_minute": rate, "best": 10.0}}


def test_a_run_that_slows_down_is_told_once_with_its_cause_and_so_is_its_return() -> None:
    found: list[Stall] = []
    pace = SlowedPace(lambda: SLOW, lambda stall: [*map(str, found.append(stall) or ())])
    told = [
        list(pace.lines(paced(rate, step), MINUTE)) for step, rate in enumerate((10.0, 5.1, 5.0, 4.0, 7.4, 7.5, 5.0))
    ]
    assert [len(lines) for lines in told] == [0, 0, 1, 0, 0, 1, 1]
    assert all(part in told[2][0] for part in ("5 steps/s", "10", "workers wait for the disk", "snapshot less often"))
    assert [(each.kind, each.cause, each.step) for each in found] == [("slow", "disk", 2), ("slow", "disk", 6)]


def test_after_a_pause_the_pace_of_the_last_minute_is_no_slow_down() -> None:
    """An evaluation of a minute lies within it, or the replacement of a worker."""
    pace = SlowedPace(lambda: SLOW, lambda stall: ())
    assert list(pace.lines(paced(1.0, 5), MINUTE - 1)) == []
    assert len(list(pace.lines(paced(1.0, 6), MINUTE))) == 1


@pytest.mark.parametrize("answer", [None, {"slow": None}, {"slow": {"text": "nothing limits it", "findings": []}}])
def test_a_slow_down_without_a_known_cause_is_told_too(answer: dict | None) -> None:
    found: list[Stall] = []
    pace = SlowedPace(lambda: answer, lambda stall: [*map(str, found.append(stall) or ())])
    assert len(list(pace.lines(paced(1.0, 5), MINUTE))) == 1
    assert [each.cause for each in found] == ["unknown"]


def by_shell(folder: Path, line: str) -> StallCommand:
    return StallCommand(("sh", "-c", line), folder)


def until_told(command: StallCommand) -> str:
    """Text about the end of a command, before its time is over."""
    found: list[str] = []
    wait_for(lambda: bool(found.extend(command.look(0.0)) or found))
    return found[0]


def test_the_command_gets_the_run_and_the_cause(tmp_path: Path) -> None:
    with by_shell(tmp_path, 'env > "$STAGELINE_FOLDER/part"; exit 3') as command:
        (told,) = command.start(STALLED, 0.0)
        assert "--on-stall" in told
        assert "exit code 3" in until_told(command)
    found = dict(line.split("=", 1) for line in (tmp_path / "part").read_text().splitlines() if "=" in line)
    names = ("RUN", "FOLDER", "EVENT", "CAUSE", "TEXT", "ACTION", "STEP")
    assert [found[f"STAGELINE_{name}"] for name in names] == [
        tmp_path.name, str(tmp_path), "stalled", "silent", STALLED.text, STALLED.action, "12"
    ]  # fmt: skip


def test_a_command_that_fails_is_told_with_where_its_output_is(tmp_path: Path) -> None:
    with by_shell(tmp_path, "echo no mail today; exit 4") as command:
        list(command.start(STALLED, 0.0))
        told = until_told(command)
        assert all(part in told for part in ("exit code 4", "on-stall.log"))
        assert (tmp_path / "on-stall.log").read_text() == "no mail today\n"
        assert list(command.look(0.0)) == []


def test_a_command_that_does_not_end_is_killed_and_told(tmp_path: Path) -> None:
    with by_shell(tmp_path, "sleep 1000") as command:
        pid = started(command)
        assert list(command.look(BOUND - 1)) == []
        assert "killed" in next(iter(command.look(BOUND)))
        assert not psutil.pid_exists(pid)


def test_while_a_command_runs_no_other_is_started_and_with_the_run_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "_LAST", 0.0)
    with by_shell(tmp_path, "sleep 1000") as command:
        pid = started(command)
        assert "still runs" in next(iter(command.start(STALLED, 1.0)))
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def started(command: StallCommand) -> int:
    (told,) = command.start(STALLED, 0.0)
    return int(told.partition("pid ")[2].partition(";")[0])


@pytest.mark.parametrize(
    ("line", "said"),
    [("no-such-program --now", "no program 'no-such-program'"), ("", "it is empty"), ("sh -c 'x", "split into words")],
)
def test_a_command_that_cannot_be_started_is_refused_before_the_run(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert workspace.here("train", ".", "--on-stall", line) == ExitCode.USAGE
    assert said in capsys.readouterr().err
    assert not workspace.runs()


@pytest.mark.slow
def test_a_run_whose_worker_hangs_starts_the_command_once_and_goes_on(workspace: Workspace) -> None:
    script = workspace.folder / "notify"
    script.write_text('#!/bin/sh\necho "$STAGELINE_EVENT $STAGELINE_CAUSE $STAGELINE_RUN" >> told\nexit 1\n')
    script.chmod(0o755)
    sets = ("--set", "run.steps=100000", "--set", "recovery.lease=600")
    train = workspace.start("train", *sets, "--on-stall", shlex.join([str(script)]))
    wait_for(lambda: any(each.stat().st_size for each in workspace.folder.rglob("metrics.jsonl")))
    worker = psutil.Process(workspace.worker(1))
    worker.suspend()
    said = until_line(train.stderr, "--on-stall: the command failed")
    worker.resume()
    assert "The run goes on" in said
    run = workspace.runs()[0].name
    event, _, told = (workspace.folder / "told").read_text().split()
    assert (event, told) == ("stalled", run)
    until_line(train.stderr, "the run goes on, after")
    assert workspace.command("run", "stop").returncode == 0
    assert train.wait() == ExitCode.SAVED


def until_line(stream: Iterator[str], text: str) -> str:
    return next(line for line in stream if text in line)
