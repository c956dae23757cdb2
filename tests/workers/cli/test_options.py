"""The kinds of value that options take."""

import click
import pytest
from click.testing import CliRunner

from stageline.workers.cli import broker_address, options
from stageline.workers.runs import folder as runs


@click.command()
@click.option("--broker", callback=broker_address.address(dials=True))
@click.option("--bind", callback=broker_address.address(dials=False))
@click.option("--run", callback=options.run_id)
@click.option("--seconds", type=options.Finite(min=0))
def command(**values: object) -> None:
    click.echo(",".join(str(value) for value in values.values() if value is not None))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--broker", "tcp://127.0.0.1:5600"),
        ("--bind", "tcp://127.0.0.1:0"),
        ("--broker", "redis://h:6379/0#digits"),
        ("--run", "digits-1"),
        ("--seconds", "0.5"),
    ],
)
def test_a_good_value_is_taken_as_it_is(arguments):
    assert CliRunner().invoke(command, arguments).output == f"{arguments[1]}\n"


def test_a_run_is_named_by_its_id_or_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "digits-1"
    folder.mkdir(parents=True)
    (folder / runs.PLAN).write_text("{}")
    monkeypatch.chdir(tmp_path)
    for written in ("digits-1", "runs/digits-1", "runs/digits-1/", str(folder)):
        assert CliRunner().invoke(command, ["--run", written]).output == "digits-1\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--broker", "tcp://127.0.0.1:0"), "the one that the broker listens at"),
        (("--broker", "ipc://"), "goes with a path"),
        (("--bind", "http://x"), "begins with ipc:// or tcp://"),
        (("--run", "a/b"), "is no run's id"),
        (("--run", f"runs/{'a' * 300}"), "is no run's id"),
        (("--seconds", "nan"), "not a finite number"),
    ],
)
def test_a_bad_value_is_refused_with_what_would_be_right(arguments, hint):
    ended = CliRunner().invoke(command, arguments)
    assert ended.exit_code == 2
    assert hint in ended.output


def test_a_password_on_the_command_line_is_warned_of_and_never_shown_to_others(capsys):
    assert "warning" in CliRunner().invoke(command, ["--broker", "redis://u:secret@h:6379/0#d"]).output
    assert options.without_passwords(["queues.url=redis://u:secret@h:6379/0", "run.steps=3"]) == ["run.steps=3"]


def test_the_arguments_of_a_plan_repeat_every_set():
    assert options.plan_arguments("p.toml", ["a=1", "b=2"]) == ["p.toml", "--set", "a=1", "--set", "b=2"]
