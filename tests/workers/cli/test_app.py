"""The command line as a whole: help, typing errors, unexpected errors, what is imported."""

import errno
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
import zmq

from stageline.workers.cli.app import run, stageline
from support.paths import ROOT
from support.workspace import PLAN


def output_of(capsys, *arguments):
    """Text that a command of this process writes to stdout; it must end well."""
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_every_file_in_the_folder_of_commands_defines_a_command() -> None:
    context = click.Context(stageline)
    commands = [stageline.get_command(context, name) for name in stageline.list_commands(context)]
    files = {command.callback.__module__.rpartition(".")[2] for command in commands if command and command.callback}
    assert files == {file.stem for file in (ROOT / "workers/cli/commands").glob("[a-z]*.py")}


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("trian .", "did you mean train?"),
        ("xyzzy", "there are allow, audit, broker"),
        ("train . --jsn", "--json"),
        ("train . --batch-size 8", "--set data.batch_size=VALUE"),
        ("plan --schedule.name=1f1b", "--set schedule.name=VALUE"),
        ("schedule shw 1f1b", "schedule shw; did you mean show?"),
        ("verify runs/x", "did you mean checkpoint verify?"),
        ("ls", "did you mean checkpoint ls or keys ls or microbatch ls or queue ls or run ls?"),
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", ".", "--set", "run.dir=a\udcff"], r"after --set, 'run.dir=a\udcff', is not UTF-8"),
        (["plan", "a\udcff"], r"the argument, 'a\udcff', is not UTF-8"),
    ],
)
def test_an_argument_that_is_not_utf8_is_named_also_where_the_current_folder_is_gone(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was checked there."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_is_not_utf8_is_named_with_the_way_out_by_all_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--version` and `--help` were refused, too, and "rename it" was said of TMPDIR."""
    (odd := tmp_path / "odd\udcff").mkdir()
    monkeypatch.chdir(odd)
    assert run(["plan", "x"]) == 2
    assert "the current folder, " in (said := capsys.readouterr().err)
    assert "(cd)" in said
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    assert run(["plan", "x"]) == 2
    assert "set TMPDIR to another" in capsys.readouterr().err
    assert output_of(capsys, "--version").startswith("stageline, version ")
    assert output_of(capsys, "plan", "--help").startswith("Usage: stageline plan")


def test_the_version_is_printed_and_no_command_at_all_gives_the_help(capsys):
    assert output_of(capsys, "--version").startswith("stageline, version ")
    assert run([]) == 2
    assert capsys.readouterr().err.startswith("Usage: stageline")


@pytest.mark.parametrize("arguments", [["schedule", "list"], ["--help"], ["status", "--broker", "ipc:///nowhere"]])
def test_what_needs_neither_torch_nor_a_plan_does_not_wait_for_their_imports(arguments):
    slow = "{'torch', 'pydantic'} & sys.modules.keys()"
    code = f"import sys; from stageline.workers.cli.app import run; run(sys.argv[1:]); print(bool({slow}))"
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


IMPORTED = """
import sys
from stageline.workers.cli.app import stageline

command = stageline.get_command(None, sys.argv[1])
print(command.name, *(name.rpartition(".")[2] for name in sys.modules if "stageline.workers.cli.commands." in name))
"""


@pytest.mark.parametrize(("command", "file"), [("why", "queries"), ("timetable", "timetable")])
def test_of_the_files_of_commands_that_of_the_command_is_imported_alone(command, file):
    """A question about a run waited for the imports of all commands."""
    asked = subprocess.run([sys.executable, "-c", IMPORTED, command], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == [command, file]


def test_a_bug_shows_its_traceback_and_asks_to_be_reported(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stageline.workers.cli.commands.queries.look", None)
    assert run(["status"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "bug in stageline" in said


def test_what_the_system_refuses_zeromq_is_a_message_not_a_bug(capsys, monkeypatch, tmp_path):
    def ask(*arguments):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stageline.workers.cli.commands.queries.look", ask)
    assert run(["status"]) == 1
    assert capsys.readouterr().err == "stageline: Too many open files\n"


def test_debug_shows_the_traceback_of_an_expected_error_too(capsys):
    assert run(["plan", "nowhere"]) == 78
    assert "Traceback" not in capsys.readouterr().err
    assert run(["--debug", "plan", "nowhere"]) == 78
    assert "Traceback" in capsys.readouterr().err


def test_with_json_an_error_is_one_line_of_json_on_stdout(workspace, capsys):
    wrong = workspace.folder / "wrong.toml"
    wrong.write_text(PLAN.replace("steps = 6", "steps = -6").replace("lr = 0.1", 'lr = "fast"'))
    assert (
        workspace.here("plan", "wrong.toml", "--json", "--set", "run.sead=3", "--set", "schedule.microbatches=0") == 78
    )
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["schema"], told["exit_code"]) == ("error/1", 78)
    assert f"stageline: {told['message']}\n" == printed.err
    faults = {fault["key"]: fault for fault in told["errors"]}
    assert faults["run.steps"] == {
        "where": "wrong.toml:4",
        "file": "wrong.toml",
        "line": 4,
        "key": "run.steps",
        "value": "-6",
        "message": "expected a whole number of at least 1",
    }
    assert [faults["run.sead"][name] for name in ("where", "file", "line")] == ["--set", None, None]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("train nowhere --json", 78), ("status nowhere --json", 78), ("why --stage x --json", 2), ("xyzzy --json", 2)],
)
def test_whatever_fails_with_json_prints_the_error_and_its_exit_code(arguments, code, workspace, capsys):
    assert workspace.here(*arguments.split()) == code
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["exit_code"] == code


def test_an_error_that_names_what_was_typed_does_not_control_the_terminal(capsys):
    assert run(["status", "no\x1b[2Jfolder"]) != 0
    assert run(["no\x1b[2Jcommand"]) == 2
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert "no\\x1b[2Jfolder" in printed
    assert "no\\x1b[2Jcommand" in printed
