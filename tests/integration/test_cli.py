"""The commands, as a user types them: what they print, where, and with which exit code they end."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stageline.pipeline import schedule
from stageline.pipeline.plan import from_mapping, read_plan
from stageline.pipeline.schedule.check import check_schedule
from stageline.workers.cli.app import COMMANDS, run
from stageline.workers.cli.commands.schedule import ABOUT
from stageline.workers.control.client import Client
from support.workspace import free_port, until

TRAIN_1 = [
    "schema",
    "run",
    "steps",
    "microbatches",
    "loss",
    "losses",
    "metrics",
    "weights_sha256",
    "seconds",
    "restarts",
]


def output_of(capsys, *arguments):
    """What a command of this process writes to stdout; it must end well."""
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_train_ends_with_one_line_of_json_and_keeps_it_with_the_plan_in_the_runs_folder(workspace, capsys):
    ended = workspace.command("train", ".", "--json", cold=True)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    result = json.loads(line)
    assert list(result) == TRAIN_1
    assert (result["schema"], result["steps"], result["microbatches"], result["restarts"]) == ("train/1", 6, 3, 0)
    assert list(result["losses"]) == ["0", "2", "4"]
    assert 0 <= result["metrics"]["accuracy"] <= 1
    (folder,) = workspace.runs()
    assert folder.name == result["run"]
    assert json.loads((folder / "result.json").read_text()) == result
    kept = from_mapping(json.loads((folder / "plan.json").read_text()))
    assert kept.digest() == read_plan(workspace.folder).digest()
    assert not (folder / "broker.url").exists()

    assert workspace.here("train", ".", "--json", "--set", "queues.url=memory://") == 0
    in_memory = json.loads(capsys.readouterr().out)
    assert in_memory["weights_sha256"] == result["weights_sha256"]
    assert in_memory["losses"] == result["losses"]


def test_train_for_people_ends_with_what_it_came_to_and_the_timetable_as_it_ran(workspace, capsys):
    code = workspace.here("train", ".")
    ended = capsys.readouterr()
    assert code == 0, ended.err
    (folder,) = workspace.runs()
    said = dict(line.split(maxsplit=1) for line in ended.out.partition("\n\n")[0].splitlines())
    result = json.loads((folder / "result.json").read_text())
    assert said["run"] == f"runs/{folder.name}"
    assert said["weights_sha256"] == result["weights_sha256"]
    assert float(said["accuracy"]) == pytest.approx(result["metrics"]["accuracy"])
    timetable = ended.out.partition("as it ran")[2]
    assert [row.split()[1] for row in timetable.splitlines() if row.startswith("worker ")] == ["0", "1"]
    assert "\x1b" not in ended.out + ended.err
    assert "stageline: running" in ended.err


def test_a_metric_that_is_no_finite_number_is_told_as_what_it_is(workspace, capsys):
    # JSON has null for it, from which no line for people could be drawn: the run ended in a traceback.
    with (workspace.folder / "model.py").open("a") as model:
        model.write("def lost(outputs, targets):\n    return float('nan')\n")
        model.write("def endless(outputs, targets):\n    return outputs.sum() + float('inf')\n")
    metrics = "model.metrics=['model.py:lost', 'model.py:endless', 'model.py:accuracy']"
    assert workspace.here("train", ".", "--json", "--set", "queues.url=memory://", "--set", metrics) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (result["metrics"]["lost"], result["metrics"]["endless"]) == ("nan", "inf")
    assert 0 <= result["metrics"]["accuracy"] <= 1
    assert workspace.here("status") == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (said["lost"], said["endless"]) == ("nan", "inf")


def test_three_terminals_over_tcp_train_to_the_same_weights_and_can_be_asked_meanwhile(workspace, capsys):
    config = (".", "--set", "queues.url=tcp://127.0.0.1:0", "--set", "run.steps=6")
    broker = workspace.start("broker", *config, "--bind", f"tcp://127.0.0.1:{free_port()}", cold=True)
    url = until(broker.stderr, "broker at").split("broker at ")[1].split(",")[0]
    maps = Path(f"/proc/{broker.pid}/maps").read_text()
    assert "torch" not in maps, "a broker that knows the number of stages has no need of torch"

    assert run(["status", "--broker", url, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["schema"], before["phase"], before["missing"]) == ("status/1", "waiting", [0, 1])
    assert workspace.here("status") == 0  # finds the newest run of the folder by itself
    assert "waits for worker 0, 1" in capsys.readouterr().out

    workers = [workspace.start("worker", *config, "--broker", url, cold=cold) for cold in (True, False)]
    for worker in workers:
        _, errors = worker.communicate()
        assert worker.returncode == 0, errors
    assert run(["status", "--broker", url]) == 0
    said = capsys.readouterr().out
    assert "finished" in said
    assert "6 of 6 steps" in said
    assert run(["queue", "ls", "--broker", url]) == 0
    assert capsys.readouterr().out.startswith("queues of run small-")
    with Client(url) as client:
        facts = client.ask("status")
        client.stop_run("the test has seen enough", 0)
    _, log = broker.communicate()
    assert broker.returncode == 0
    assert f"weights_sha256 {facts['weights_sha256']}" in log
    (folder,) = workspace.runs()
    assert json.loads((folder / "result.json").read_text())["weights_sha256"] == facts["weights_sha256"]

    assert workspace.here("train", ".", "--json", "--set", "queues.url=memory://") == 0
    assert json.loads(capsys.readouterr().out)["weights_sha256"] == facts["weights_sha256"]


def test_on_a_terminal_train_draws_bars_and_gives_the_cursor_back(workspace):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "stageline", "train", ".", "--set", "queues.url=memory://", "--json"],
        cwd=workspace.folder,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    stdout, _ = process.communicate()
    drawn = os.read(master, 2**16).decode()
    os.close(master)
    assert process.returncode == 0
    assert json.loads(stdout)["schema"] == "train/1"
    assert "samples/s" in drawn
    assert "stage 1" in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_a_plan_is_shown_with_who_decided_each_key_and_what_the_stages_take(workspace, capsys):
    assert workspace.here("plan", ".", "--set", "run.steps=9") == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["run.steps"] == ["run.steps", "9", "--set"]
    assert rows["model.cut"] == ["model.cut", "[2]", "file"]
    assert rows["queues.url"] == ["queues.url", '"ipc://"', "default"]
    assert "forward-1" in rows


def test_a_plans_forecast_counts_parameters_bytes_and_messages_as_they_are(workspace, capsys):
    assert workspace.here("plan", ".", "--json", "--set", "optimizer.factory=torch.optim.Adam") == 0
    found = json.loads(capsys.readouterr().out)
    first, last = found["stages"]
    assert found["schema"] == "plan/1"
    assert [first["parameters"], last["parameters"]] == [4 * 8 + 8, 8 * 2 + 2]
    assert first["bytes"]["weights"] == first["bytes"]["gradients"] == 4 * first["parameters"]
    two_moments_and_a_step_count_for_each_of_two_tensors = 2 * first["bytes"]["weights"] + 2 * 4
    assert first["bytes"]["optimizer"] == two_moments_and_a_step_count_for_each_of_two_tensors
    assert (first["in_flight"], last["in_flight"]) == (2, 1)
    assert first["total"] == sum(first["bytes"].values())
    queues = {each["queue"]: each for each in found["queues"]}
    activation = 2 * 8 * 4  # rows, width, bytes of a float32
    assert activation < queues["forward-1"]["message"] < activation + 200  # and a header
    assert queues["forward-1"]["retained"] == 3 * 6 * queues["forward-1"]["message"]  # of 3 microbatches, all 6 steps
    assert found["idle"] == list(check_schedule(schedule.make_schedule("1f1b", [(0,), (1,)], 3)).idle)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_messages_that_have_no_room_until_a_checkpoint_lets_them_go_are_refused(command, workspace, capsys):
    assert workspace.here("plan", ".", "--json", "--set", "recovery.restarts=0") == 0
    step = max(each["retained"] for each in json.loads(capsys.readouterr().out)["queues"])
    words = (command, ".", "--set", "run.steps=50", "--set", "recovery.snapshot_every=9")
    tight = f"queues.retain_bytes={10 * step // 5 - 1}"
    assert workspace.here(*words, "--set", tight, "--set", "recovery.restarts=1") == 78
    said = capsys.readouterr().err
    assert "the messages of 10 steps (recovery.snapshot_every is 9)" in said
    assert 'Use "1MiB" or more, or a smaller recovery.snapshot_every' in said
    assert workspace.runs() == []
    off = ("--set", "recovery.restarts=0")  # then a step's messages are enough
    assert workspace.here("plan", ".", *words[2:], *off, "--set", tight) == 0
    capsys.readouterr()
    assert workspace.here(*words, *off, "--set", f"queues.retain_bytes={step // 5 - 1}") == 78
    assert "the messages of one step" in capsys.readouterr().err


def test_messages_that_just_have_room_until_a_checkpoint_are_not_refused(workspace, capsys):
    assert workspace.here("plan", ".", "--json", "--set", "recovery.restarts=0") == 0
    step = max(each["retained"] for each in json.loads(capsys.readouterr().out)["queues"])
    words = ("--set", "run.steps=50", "--set", "recovery.snapshot_every=9", "--set", "recovery.restarts=1")
    assert workspace.here("plan", ".", *words, "--set", f"queues.retain_bytes={2 * step}") == 0


def test_without_arguments_the_newest_run_is_looked_at_even_if_it_is_over(workspace, capsys):
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    weights = json.loads((workspace.runs()[0] / "result.json").read_text())["weights_sha256"]
    capsys.readouterr()
    assert workspace.here("status") == 0
    assert weights in capsys.readouterr().out
    assert workspace.here("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "train/1"
    for words in (("queue", "ls"), ("why",), ("story", "1/0")):
        assert workspace.here(*words) == 3
        assert f"run {workspace.runs()[0].name} has finished" in capsys.readouterr().err


def test_the_broker_tells_how_to_start_workers_of_the_same_plan(workspace):
    sets = ("run.steps=4", "queues.url=tcp://127.0.0.1:0", "optimizer.note=a b")
    options = [word for each in sets for word in ("--set", each)]
    broker = workspace.start("broker", ".", *options, "--bind", f"tcp://127.0.0.1:{free_port()}")
    told = shlex.split(until(broker.stderr, "start every worker with: ").partition("with: ")[2])
    assert told[:-2] == ["stageline", "worker", ".", *options]
    assert told[-2] == "--broker"
    for number in (signal.SIGINT, signal.SIGINT):
        broker.send_signal(number)
    broker.communicate()


def test_doctor_finds_this_machine_and_the_small_plan_well(workspace, capsys):
    assert workspace.here("doctor", ".", "--json") == 0
    findings = {each["what"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert {"torch", "package pipeline", "ipc sockets", "fingerprint", "determinism"} <= set(findings)
    assert "same bits" in findings["determinism"]["found"]


def test_doctor_finds_data_that_is_not_the_same_twice(workspace, capsys):
    text = (workspace.folder / "data.py").read_text()
    workspace.write(
        "data.py", text.replace("generator=torch.Generator().manual_seed(1)", "generator=entropy()") + ENTROPY
    )
    assert workspace.here("doctor", ".") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 1
    assert wrong[0].startswith("WRONG determinism")


ENTROPY = """
def entropy():
    generator = torch.Generator()
    generator.seed()
    return generator
"""


def test_doctor_names_what_is_wrong_with_a_plan_and_looks_on(workspace, capsys):
    assert workspace.here("doctor", ".", "--set", "model.cut=[7]") == 1
    said = capsys.readouterr().out
    assert "WRONG plan: model.cut = [7]" in said
    assert "ok    run.dir" in said


def test_the_schedules_are_listed_each_with_a_sentence(capsys):
    assert tuple(ABOUT) == schedule.schedule_names()
    listed = output_of(capsys, "schedule", "list").splitlines()[2:]
    assert [line.split()[0] for line in listed] == list(schedule.schedule_names())
    facts = json.loads(output_of(capsys, "schedule", "list", "--json"))
    assert [each["name"] for each in facts["schedules"]] == list(schedule.schedule_names())


def test_a_schedule_is_drawn_and_measured(capsys, tmp_path):
    picture = tmp_path / "1f1b.svg"
    said = output_of(capsys, "schedule", "show", "1f1b", "--stages", "2", "--microbatches", "2", "--svg", str(picture))
    assert said.splitlines()[0] == "1f1b, 2 stages on 2 workers, 2 microbatches"
    assert "bubble 3 of 9 (33 %); in flight at most 2 on stage 0, 1 on stage 1" in said
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")  # noqa: S314  # our own


@pytest.mark.parametrize(
    ("arguments", "placement"),
    [
        (["gpipe", "--stages", "3"], ((0,), (1,), (2,))),
        (["1f1b", "--stages", "4", "--workers", "2"], ((0, 1), (2, 3))),
        (["interleaved-1f1b", "--stages", "4", "--workers", "2"], ((0, 2), (1, 3))),
        (["1f1b", "--placement", "0,3;1,2"], ((0, 3), (1, 2))),
    ],
)
def test_the_json_of_a_schedule_says_what_the_checker_says(arguments, placement, capsys):
    facts = json.loads(output_of(capsys, "schedule", "show", *arguments, "--microbatches", "4", "--json"))
    made = schedule.make_schedule(arguments[0], placement, 4)
    verdict = check_schedule(made)
    assert facts["placement"] == [list(stages) for stages in placement]
    assert facts["actions"] == [[str(action) for action in actions] for actions in made.workers]
    assert (facts["span"], facts["bubble"]) == (verdict.span, verdict.bubble)
    assert facts["stage_peak"] == list(verdict.stage_peak)


@pytest.mark.parametrize("command", [*COMMANDS, "queue ls", "schedule list", "schedule show"])
def test_help_of_every_command_shows_an_example(command, capsys):
    said = output_of(capsys, *command.split(), "--help")
    assert said.startswith(f"Usage: stageline {command}")
    if command not in ("queue", "schedule"):  # these only hold commands
        assert f"Example: stageline {command}" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("trian .", "did you mean train?"),
        ("xyzzy", "there are train, worker, broker"),
        ("train . --jsn", "--json"),
        ("schedule show 1f1 --stages 2 --microbatches 2", "did you mean 1f1b?"),
        ("schedule show 1f1b --stages two --microbatches 2", "two"),
        ("schedule show 1f1b --placement 0;x --microbatches 2", "0,2;1,3"),
        ("schedule show 1f1b --microbatches 2", "--stages"),
        ("worker . --index -1", "--index"),
        ("worker . --patience nan", "not a finite number"),
        ("worker . --broker foo", "tcp://127.0.0.1:5600"),
        ("broker . --run ../../x", "is no run's id"),
        ("train . --resume a/b", "is no run's id"),
        ("broker . --bind foo", "ipc:///tmp/stageline"),
        ("status --broker foo", "begins with ipc:// or tcp://"),
        ("status --broker tcp://127.0.0.1", "a host and a port"),
        ("queue ls --broker tcp://127.0.0.1:x", "a host and a port"),
        ("why --broker tcp://127.0.0.1:0", "the one that the broker listens at"),
        ("why --broker ipc://", "goes with a path"),
        ("story 5 --broker tcp://127.0.0.1:5600", "118/5"),
        ("schedule show 1f1b --stages 2 --microbatches 2 --forward nan", "not a finite number"),
        ("schedule show 1f1b --stages 2 --microbatches 2 --backward 1e400", "not a finite number"),
        ("schedule show 1f1b --placement 0;1 --stages 5 --microbatches 2", "contradicts the --placement"),
        ("schedule show 1f1b --placement 0;1 --workers 3 --microbatches 2", "contradicts the --placement"),
        ("schedule show 1f1b --stages 2 --workers 3 --microbatches 2", "more than there are stages"),
        ("schedule show window --stages 2 --window 1,4 --microbatches 2", "raise the window of stage 0"),
        ("schedule show 1f1b --placement 0;0 --microbatches 2", "exactly one owner"),
        ("schedule show gpipe --stages 1000000000 --microbatches 1000000000", "too many to draw"),
    ],
)
def test_what_is_typed_wrong_is_answered_with_a_hint_and_exit_code_2(arguments, hint, capsys):
    assert run(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("stageline: ")
    assert hint in captured.err


def test_the_version_is_told_and_no_command_at_all_gives_the_help(capsys):
    assert output_of(capsys, "--version").startswith("stageline, version ")
    assert run([]) == 2
    assert capsys.readouterr().err.startswith("Usage: stageline")


def test_the_shell_completes_commands_and_schedules(workspace):
    def completed(words: str) -> list[str]:
        ended = workspace.command(
            cold=True,
            _STAGELINE_COMPLETE="bash_complete",
            COMP_WORDS=f"stageline {words}",
            COMP_CWORD=str(len(words.split())),
        )
        return [line.partition(",")[2] for line in ended.stdout.splitlines()]

    assert completed("tr") == ["train"]
    assert completed("schedule show 1") == ["1f1b"]


@pytest.mark.parametrize("arguments", [["schedule", "list"], ["--help"], ["status", "--broker", "ipc:///nowhere"]])
def test_what_needs_no_torch_does_not_wait_for_it(arguments):
    code = "import sys; from stageline.workers.cli.app import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


def test_a_bug_shows_its_traceback_and_asks_to_be_reported(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stageline.workers.cli.ask.ask", None)
    monkeypatch.setattr("stageline.workers.cli.commands.status.ask", None)
    assert run(["status"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "bug in stageline" in said


def test_debug_shows_the_traceback_of_an_expected_error_too(capsys):
    assert run(["plan", "nowhere"]) == 78
    assert "Traceback" not in capsys.readouterr().err
    assert run(["--debug", "plan", "nowhere"]) == 78
    assert "Traceback" in capsys.readouterr().err
