"""`logs`: the logs of a run, merged by time, from its folder and from workers elsewhere."""

import json
import re
import signal
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any

import jsonschema
import pytest

from stageline.workers.cli.asking.log_lines import LogPlaces, RunLogs
from stageline.workers.cli.schemas import schema_of
from stageline.workers.runs.logs import stamped
from support.workspace import Workspace, until, wait_for

HERE = socket.gethostname()
NOON = 1_700_049_600.0
Row = dict[str, Any]


def worker(index: int, host: str = HERE, clock: tuple[float, float] | None = None) -> Row:
    return {"index": index, "name": f"worker-{index}", "host": host, "clock": clock}


def status(*workers: Row) -> Row:
    return {"run": "run-1", "source": "broker", "workers": list(workers)}


def write(folder: Path, **logs: Mapping[float, str]) -> None:
    for name, lines in logs.items():
        text = "".join(f"{stamped(NOON + at, line)}\n" for at, line in lines.items())
        (folder / f"{name.replace('_', '-')}.log").write_text(text)


class TellingWorker:
    """A worker elsewhere that tells its lines, and is asked again."""

    def __init__(self, *lines: tuple[float, str, str]) -> None:
        self.lines = [{"time": NOON + at, "level": level, "text": text} for at, level, text in lines]

    def __call__(self, what: str, worker: str, start: str) -> Row:
        assert what == "log"
        kept = {"first": int(start), "lines": self.lines[int(start) :][:1]}
        return {"schema": "log/1", "run": "run-1", "worker": int(worker), "name": f"worker-{worker}", "kept": kept}


def merged(folder: Path | None, facts: Row, ask: Any = None, wanted: int | str | None = None) -> list[tuple]:
    found = RunLogs(folder, wanted)
    found.find(places := LogPlaces(facts, folder))
    return [(each.log, round(each.time - NOON, 3), each.text) for each in found.lines(places, ask)]


def test_the_files_of_all_processes_are_merged_by_time(tmp_path: Path) -> None:
    write(tmp_path, broker={1: "begins", 4: "ends"}, worker_0={2: "one", 3: "two"}, launcher={0.5: "starts"})
    found = merged(tmp_path, status(worker(0)))
    assert found == [
        ("launcher", 0.5, "starts"),
        ("broker", 1.0, "begins"),
        ("worker-0", 2.0, "one"),
        ("worker-0", 3.0, "two"),
        ("broker", 4.0, "ends"),
    ]
    assert {name for name, _, _ in merged(tmp_path, status(worker(0)), wanted=0)} == {"worker-0"}
    assert {name for name, _, _ in merged(tmp_path, status(worker(0)), wanted="broker")} == {"broker"}


def test_times_of_a_clock_that_is_ahead_are_moved_so_that_what_was_sent_comes_before_what_was_taken(tmp_path):
    """The clock of lab is 3 s ahead of the broker's."""
    write(tmp_path, broker={1: "stop is said"})
    told = TellingWorker((3.5, "info", "joined"), (4.2, "warning", "stopped"))
    found = merged(
        tmp_path, status(worker(0, "lab", (-3.0, 0.001)), worker(1, "desk", (0.0, 0.001))), told, wanted=None
    )
    own = [(log, at, text) for log, at, text in found if log != "worker-1"]
    assert own == [("worker-0", 0.5, "joined"), ("broker", 1.0, "stop is said"), ("worker-0", 1.2, "stopped")]


def test_a_worker_elsewhere_tells_each_line_once_and_its_lines_have_levels(tmp_path: Path) -> None:
    told = TellingWorker((1, "info", "one"), (2, "error", "two\n    more"))
    found = RunLogs(tmp_path, None)
    found.find(places := LogPlaces(status(worker(3, "lab")), tmp_path))
    lines = list(found.lines(places, told))
    assert [(each.text, each.level, each.source) for each in lines] == [
        ("one", "", "worker"),
        ("two", "error", "worker"),
        ("    more", "error", "worker"),
    ]
    assert list(found.lines(places, told)) == []
    told.lines.append({"time": NOON + 3, "level": "info", "text": "three"})
    assert [each.text for each in found.lines(places, told)] == ["three"]


def test_a_log_that_nobody_tells_is_named_with_its_machine_and_the_reason(tmp_path: Path) -> None:
    def refuses(what: str, **of: str) -> Row:
        raise ValueError("log: data.stays is set")

    found = RunLogs(tmp_path, None)
    found.find(places := LogPlaces(status(worker(0, "lab")), tmp_path))
    assert list(found.lines(places, refuses)) == []
    (reason,) = found.lacking.values()
    assert all(part in reason for part in ("worker 0", "worker-0 on lab", "data.stays is set", "stderr"))


@pytest.mark.parametrize(("there", "wanted", "said"), [(False, None, True), (True, None, False), (False, 0, False)])
def test_that_the_log_of_the_broker_is_elsewhere_is_said_if_it_is_wanted(tmp_path, there, wanted, said) -> None:
    write(tmp_path, worker_0={1: "one"}, **({"broker": {2: "two"}} if there else {}))
    found = RunLogs(tmp_path, wanted)
    found.find(LogPlaces(status(worker(0)), tmp_path))
    found.note_broker()
    assert ("broker" in found.lacking) is said


def test_a_warning_and_an_error_of_a_file_have_their_levels(tmp_path: Path) -> None:
    write(tmp_path, worker_0={1: "stageline: warning: waits", 2: "stageline: failed", 3: "goes on"})
    with (tmp_path / "worker-0.log").open("a") as log:
        log.write("stageline: ends\n")
    found = RunLogs(tmp_path, None)
    found.find(places := LogPlaces(status(worker(0)), tmp_path))
    levels = [(each.level, each.text) for each in found.lines(places, None)]
    assert levels == [("warning", "waits"), ("error", "failed"), ("", "goes on"), ("", "stageline: ends")]


@pytest.mark.parametrize("since", ["yesterday", "25:99", "10 years", "2026-99-01"])
def test_a_time_that_is_none_is_refused_with_the_ways_to_write_one(workspace: Workspace, capsys, since: str) -> None:
    assert workspace.here("logs", "--since", since) == 2
    said = capsys.readouterr().err
    assert repr(since) in said
    assert "10min" in said


def test_a_run_that_is_not_there_is_told_as_such(workspace: Workspace, capsys) -> None:
    assert workspace.here("logs", "runs/none") == 78
    assert "runs/none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_the_log_that_is_wanted_is_told_as_such(workspace: Workspace, capsys) -> None:
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    assert workspace.here("logs", "7") == 2
    assert "no log of worker 7" in capsys.readouterr().err


@pytest.mark.slow
def test_the_logs_of_a_run_are_followed_until_its_end(workspace: Workspace, capsys) -> None:
    began = time()
    train = workspace.start("train", ".", "--set", "run.steps=200000")
    until(train.stderr, "running")
    following = workspace.start("logs", "-f", "--lines", "100", "--json")
    train.send_signal(signal.SIGINT)
    said, errors = following.communicate()
    assert (following.wait(), errors) == (0, "")
    assert train.wait() == 75
    lines = [json.loads(each) for each in said.splitlines()]
    for line in lines:
        jsonschema.validate(line, schema_of("logs/1"))
    texts = [f"{each['log']}: {each['text']}" for each in lines]
    for part in ("broker: .*all workers have joined", "worker-0: assigned", "worker-1: .*interrupted"):
        assert any(re.search(part, text) for text in texts), texts
    assert all(began - 1 <= each["time"] <= time() + 1 for each in lines)
    capsys.readouterr()
    assert workspace.here("logs", "0", "--lines", "1") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S.%f")
    assert " worker-0 " in line
    assert workspace.here("logs", "--since", "1s", "broker") == 0
    assert workspace.here("logs", "launcher") == 2
    assert "launcher" in capsys.readouterr().err


@pytest.mark.slow
def test_workers_whose_logs_are_in_no_folder_tell_their_lines_through_the_broker(workspace: Workspace, capsys) -> None:
    broker = workspace.start("broker", ".", "--bind", "tcp://127.0.0.1:0", "--set", "run.steps=200000")
    url = until(broker.stderr, "broker at").split("broker at ")[1].split(",")[0]
    workers = [workspace.start("worker", ".", "--broker", url, "--set", "run.steps=200000") for _ in range(2)]
    capsys.readouterr()

    def told() -> bool:
        ended, said = workspace.here("logs", "--json", "--broker", url), capsys.readouterr().out
        found = [json.loads(each) for each in said.splitlines()] if ended == 0 else []
        for line in found:
            jsonschema.validate(line, schema_of("logs/1"))
        return {each["worker"] for each in found if each["text"].startswith("assigned")} == {0, 1}

    wait_for(told)
    assert workspace.here("logs", "1") == 0
    out, _ = capsys.readouterr()
    assert "this process is worker 1 " in out
    assert "this process is worker 0 " not in out
    for each in (*workers, broker):
        each.send_signal(signal.SIGTERM)
    for each in (*workers, broker):
        each.communicate()
    assert workspace.here("logs") == 0
    assert "is not in the run's folder" in capsys.readouterr().err
