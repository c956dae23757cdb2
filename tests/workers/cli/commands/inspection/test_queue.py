"""`queue` and `microbatch`: what runs over several transports tell of their queues, while they run and afterwards."""

import json
import signal

import jsonschema
import pytest

from stageline.workers.cli.commands.queue import _show_messages
from stageline.workers.cli.schemas import SCHEMAS, schema_of
from stageline.workers.cli.tables.queues import show_queues
from support.workspace import Command, Workspace, until, wait_for

ROW = {
    "queue": "forward-1", "producer": "stage 0", "consumer": "stage 1", "put": 41, "taken": 37, "ready": 1,
    "in_flight": 2, "retained": 5, "bytes": 4096, "put_pace": 12.25, "taken_pace": None, "credit_used": 4,
    "credit_limit": 8, "resent": 2, "oldest": 0.5,
}  # fmt: skip
CALLS = {**dict.fromkeys(ROW), "queue": "call-1", "producer": "the script", "consumer": "worker 1"}
FACTS = {"run": "small-1", "heard": 0.25, "queues": [ROW, CALLS]}
ENDLESS = ("--set", "run.steps=200000")
KEEPS = ("--set", "recovery.restarts=1", "--set", "recovery.snapshot_every=100000")  # all messages


def told(workspace: Workspace, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    """The lines of JSON that a command prints, each in agreement with its published schema."""
    capsys.readouterr()
    code = workspace.here(*words, "--json")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    lines = [json.loads(line) for line in printed.out.splitlines()]
    for line in lines:
        jsonschema.validate(line, schema_of(line["schema"]))
    return lines


def interrupt(train: Command) -> None:
    train.send_signal(signal.SIGINT)
    assert train.wait() in (75, 130)  # 130: no step could be finished in time, and nothing is saved


def live(workspace: Workspace, capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """The answer of the broker. The records answer first, while it is slow."""
    answers: list[dict] = []

    def is_live() -> bool:
        answers.extend(told(workspace, capsys, *words))
        return bool(answers[-1]["source"] == "broker")

    wait_for(is_live)
    return answers[-1]


def totals(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, int]]:
    """Messages that were put into each queue and taken from it."""
    (facts,) = told(workspace, capsys, "queue", "ls")
    return {row["queue"]: (row["put"] or 0, row["taken"] or 0) for row in facts["queues"]}


def test_a_run_in_one_process_has_put_and_taken_all_messages_at_its_end(workspace, capsys):
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    capsys.readouterr()
    (facts,) = told(workspace, capsys, "queue", "ls")
    assert (facts["source"], facts["state"]) == ("records", "finished")
    count = facts["queues"][0]["put"]
    assert count > 0
    assert all(put == taken > 0 for put, taken in totals(workspace, capsys).values())
    (shown,) = told(workspace, capsys, "queue", "show", "forward-1")
    assert shown["producer"]["put"]["number"] == shown["consumer"]["taken"]["number"] == count
    assert (shown["producer"]["put"]["index"], shown["producer"]["put"]["microbatch"]) == (6, 0)
    assert shown["row"] in facts["queues"]
    assert workspace.here("queue", "show", "forward-9") == 2
    said = capsys.readouterr().err
    assert "'forward-9'" in said
    assert "forward-1, backward-0" in said
    (none,) = told(workspace, capsys, "microbatch", "ls")
    assert none["microbatches"] == []


@pytest.mark.parametrize("url", ["shm://", pytest.param("ipc://", marks=pytest.mark.slow)])
def test_a_running_run_tells_of_its_queues_and_microbatches(workspace, capsys, url):
    train = workspace.start("train", ".", "--set", f"queues.url={url}", *ENDLESS)
    until(train.stderr, "running")
    wait_for(lambda: min(totals(workspace, capsys).get("backward-0", (0, 0))) > 8)
    facts = live(workspace, capsys, "queue", "show", "forward-1")
    assert (facts["producer"]["worker"], facts["consumer"]["worker"]) == (0, 1)
    assert facts["producer"]["put_bytes"] > 0
    assert facts["row"]["credit_limit"] >= 1
    (found,) = told(workspace, capsys, "microbatch", "ls", "--state", "done")
    assert {each["state"] for each in found["microbatches"]} <= {"done"}
    (status,) = told(workspace, capsys, "status")
    assert status["pace"]["bubble"]["planned"] > 0
    (story,) = told(workspace, capsys, "story", "0/1")
    assert [stage["state"] for stage in story["stages"]] == ["done", "done"]
    interrupt(train)


@pytest.mark.slow
def test_watching_ends_with_the_run_and_prints_a_line_for_each_look(workspace, capsys):
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    lines = told(workspace, capsys, "queue", "ls", "--watch", "--every", "0.1")
    assert [line["schema"] for line in lines] == ["queues/2"]
    train = workspace.start("train", ".", *ENDLESS)
    until(train.stderr, "running")
    watching = workspace.start("queue", "ls", "--watch", "--every", "0.1", "--json")
    seen = [json.loads(watching.stdout.readline()) for _ in range(3)]
    assert {line["schema"] for line in seen} == {"queues/2"}
    assert seen[0]["as_of"] < seen[1]["as_of"] < seen[2]["as_of"]
    interrupt(train)
    newest = json.loads(watching.stdout.readlines()[-1])
    assert (watching.wait(), newest["source"], newest["state"]) == (0, "records", "stopped")


def refused(workspace: Workspace, capsys: pytest.CaptureFixture[str], *words: str, part: str) -> bool:
    """True if a command is refused with a message that has `part`."""
    capsys.readouterr()
    return workspace.here(*words) == 2 and part in capsys.readouterr().err


def peeked(workspace: Workspace, capsys: pytest.CaptureFixture[str], queue: str, *words: str) -> dict:
    """Looks of a worker at its queue; nothing if it has not told of it, or does not answer in time."""
    capsys.readouterr()
    code = workspace.here("queue", "peek", queue, *words, "--json")
    found: dict = json.loads(capsys.readouterr().out)
    if code:
        return {"end": 0, "messages": []}
    jsonschema.validate(found, schema_of("peek/1"))
    return found


@pytest.mark.slow
def test_what_a_queue_retains_is_looked_at_while_the_run_goes_on(workspace, capsys):
    train = workspace.start("train", ".", *ENDLESS, *KEEPS)
    until(train.stderr, "running")
    wait_for(lambda: len(peeked(workspace, capsys, "forward-1", "2")["messages"]) == 2)
    answers: list[dict] = []

    def shows_three() -> bool:
        answers.append(peeked(workspace, capsys, "backward-0", "3", "--at", "1"))
        return len(answers[-1]["messages"]) == 3

    wait_for(shows_three)
    facts = answers[-1]
    assert [each["place"]["number"] for each in facts["messages"]] == [1, 2, 3]
    assert facts["first"] == 0
    assert all(tensor["values"]["nan"] == 0 for each in facts["messages"] for tensor in each["tensors"])
    wait_for(lambda: refused(workspace, capsys, "queue", "peek", "forward-9", part="forward-1, backward-0"))
    interrupt(train)
    assert workspace.here("queue", "peek", "forward-1") == 2
    assert "is over" in capsys.readouterr().err


def test_messages_are_shown_in_rows(capsys):
    values = {"least": -1.5, "mean": 0.25, "greatest": None, "nan": 3, "infinite": 0}
    tensors = [
        {"path": "[0]", "dtype": "float32", "shape": [2, 3], "bytes": 24, "values": values},
        {"path": "[1]", "dtype": "int64", "shape": [], "bytes": 8, "values": None},
    ]
    place = {"number": 41, "unit": "step", "index": 10, "microbatch": 1}
    message = {"place": place, "bytes": 12400, "on_disk": True, "tensors": tensors, "damage": "its CRC-32 differs"}
    facts = {"run": "small-1", "queue": "forward-1", "worker": 0, "first": 36, "end": 42, "withheld": "rows stay"}
    _show_messages({**facts, "messages": [message]})
    title, _, first, second, withheld, damage = capsys.readouterr().out.splitlines()
    assert "retains 36 to 41" in title
    assert first.split() == [
        *("41", "step", "10,", "microbatch", "1", "12.4", "kB", "disk", "[0]", "float32", "[2,", "3]"),
        *("-1.5", "0.25", "-", "3", "0"),
    ]
    assert second.split()[-7:] == ["int64", "[]", "-", "-", "-", "-", "-"]
    assert "rows stay" in withheld
    assert "its CRC-32 differs" in damage
    _show_messages({**facts, "messages": []})
    assert "none of the messages" in capsys.readouterr().out


@pytest.mark.slow
def test_exported_messages_are_computed_again_with_their_bits(workspace, capsys):
    train = workspace.start("train", ".", *ENDLESS, *KEEPS)
    until(train.stderr, "running")
    for queue in ("forward-1", "backward-0"):
        wait_for(lambda queue=queue: peeked(workspace, capsys, queue)["end"] > 16)
        (written,) = (json.loads(line) for line in export(workspace, capsys, queue, "16", "--at", "0", "--json"))
        jsonschema.validate(written, schema_of(written["schema"]))
        assert written["messages"] == list(range(16))
    assert workspace.here("queue", "export", "forward-1", "-o", "forward-1.messages") == 2
    assert "is there already" in capsys.readouterr().err
    interrupt(train)
    place = ("--stage", "1", "--step", "1", "--microbatch", "1", "--json")
    files = ("--messages", "forward-1.messages", "--messages", "backward-0.messages")
    assert workspace.here("replay", str(workspace.runs()[-1]), *place, *files) == 0
    outcomes = {each["action"]: each["same"] for each in json.loads(capsys.readouterr().out)["outcomes"]}
    assert outcomes == {"1F1": None, "1B1": True}  # a loss is in no queue
    assert workspace.here("replay", str(workspace.runs()[-1]), *place) == 2


def export(workspace: Workspace, capsys: pytest.CaptureFixture[str], queue: str, *words: str) -> list[str]:
    wait_for(lambda: workspace.here("queue", "export", queue, *words, "-o", f"{queue}.messages") == 0)
    return [line for line in capsys.readouterr().out.splitlines() if "queue-export/1" in line]


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int | None) -> list[str]:
    monkeypatch.setattr("stageline.workers.cli.options.width", lambda: width)
    show_queues(FACTS)
    return capsys.readouterr().out.splitlines()


def test_a_row_has_all_columns_where_there_is_room(capsys, monkeypatch):
    title, names, row, calls, total = shown(capsys, monkeypatch, None)
    assert "small-1" in title
    assert "250 ms" in title
    assert names.split("  ")[0] == "queue"
    assert " ".join(row.split()).startswith("forward-1 0 -> 1 41 37 1 2 5 4.1 kB 12.2 - 4/8 ")
    assert row.split()[-3:] == ["2", "500", "ms"]
    assert calls.split()[:6] == ["call-1", "script", "->", "w1", "-", "-"]
    assert total.split()[:4] == ["2", "queues", "41", "37"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_terminal_gets_the_columns_it_has_room_for_and_the_names_of_the_others(capsys, monkeypatch, width):
    lines = shown(capsys, monkeypatch, width)
    assert all(len(line) <= width for line in lines[1:-1])
    assert "put" in lines[1]
    assert "credit" in lines[1]
    assert "oldest" in lines[-1]
    assert "oldest" not in lines[1]


def test_the_bar_is_of_ascii_where_nothing_else_can_be_shown(capsys, monkeypatch):
    monkeypatch.setattr("stageline.workers.cli.options.ascii_only", lambda: True)
    assert "#####....." in shown(capsys, monkeypatch, None)[2]


def test_a_run_whose_workers_have_told_nothing_says_so(capsys):
    show_queues({**FACTS, "queues": []})
    assert "no worker has told of its queues yet" in capsys.readouterr().out


def test_every_schema_is_named_as_its_answer_is():
    assert all(schema_of(name)["properties"]["schema"]["const"] == name for name in SCHEMAS)
