"""The help of every command: its headings, examples and exit codes, its width, and what it does not import."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.app import FIRST_DAY, PURPOSES, run, stageline
from stageline.workers.cli.help import Command
from support.paths import DOCS
from support.workspace import PLAN, Workspace

RUN = "runs/digits-20260131-101500-1f0c"


def paths(group: click.Group = stageline, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, found by the folder of commands, and of the groups that hold some."""
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*before, name)
        if isinstance(found := group.get_command(context, name), click.Group):
            yield from paths(found, (*before, name))


EVERY = [" ".join(path) for path in paths()]


def command_of(words: str) -> Command:
    found: click.Command = stageline
    for word in words.split():
        assert isinstance(found, click.Group)
        inner = found.get_command(click.Context(found), word)
        assert inner is not None
        found = inner
    assert isinstance(found, Command), f"{words} has no cls=Command"
    return found


def help_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*words.split(), "--help"]) == 0
    return capsys.readouterr().out


def examples_in(said: str) -> list[list[str]]:
    """Return the examples that a help shows, as a shell would split them: one command each, without redirections."""
    shown = said.partition("Examples:\n")[2].partition("\n\n")[0].replace("\\\n", "")
    every = [part for line in shown.splitlines() for part in line.split("&&")]
    return [shlex.split(re.sub(r"[>|].*", "", each)) for each in every]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which all is that the examples name."""
    monkeypatch.chdir(tmp_path)
    for folder in (RUN, "examples/digits", "examples/gpt2"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "stageline.toml").write_text(PLAN)
    return tmp_path


def parse(words: list[str]) -> str:
    """Parse a command line with click's parser, and return the words of its command; nothing is invoked."""
    program, *rest = words
    context = stageline.make_context(program, rest)
    path: list[str] = []
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None
        assert command is not None
        context = command.make_context(name, rest, parent=context)
        path.append(name)
    return " ".join(path)


@pytest.mark.parametrize("words", EVERY)
def test_the_help_of_every_command_shows_two_examples_which_its_parser_takes(
    words: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = [parse(each) for each in examples_in(help_of(words, capsys))]
    if isinstance(command_of(words), click.Group):  # shows those of its commands
        assert all(each.startswith(f"{words} ") for each in examples)
        assert examples
    else:
        assert examples == [words, words] + ["train"] * (words == "init")


@pytest.mark.parametrize("words", EVERY)
def test_every_option_of_every_command_stands_under_a_heading_of_its_own_kind(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, said = command_of(words), help_of(words, capsys)
    options = [each for each in command.get_params(click.Context(command)) if isinstance(each, click.Option)]
    assert not [each.opts for each in options if not each.hidden and command.heading(each) == "Options"]
    assert all(f"\n{command.heading(each)}:\n" in said for each in options if not each.hidden)
    known = {name for each in options for name in each.opts}
    assert not {name for name in command.own_options if name not in known}  # an option that was renamed


@pytest.mark.parametrize("words", ["", *EVERY])
def test_no_line_of_a_help_is_wider_than_the_terminal_or_80_columns(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        said = help_of(words, capsys)
        assert not [line for line in said.splitlines() if len(line) > min(columns, 80)]
        assert "\x1b" not in said


@pytest.mark.parametrize("words", EVERY)
def test_the_help_of_every_command_has_the_exit_codes_that_all_commands_have(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(words, capsys).partition("Exit codes:\n")[2]
    listed = {int(code) for code in re.findall(r"^  (\d+) ", shown, re.MULTILINE)}
    assert listed == set(command_of(words).codes)
    assert listed >= {ExitCode.OK, ExitCode.FAILED, ExitCode.USAGE, ExitCode.INTERRUPTED}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("audit nowhere", 78),
        ("broker nowhere", 78),
        ("checkpoint ls nowhere", 2),
        ("checkpoint verify nowhere", 2),
        ("checkpoint split nowhere", 2),
        ("checkpoint import nowhere out", 2),
        ("checkpoint import nowhere out --plan nowhere", 2),
        ("doctor nowhere", 78),
        ("errors SL101", 0),
        ("errors SL110", 2),
        ("eval nowhere", 2),
        ("export nowhere out.safetensors", 2),
        ("init .", 2),
        ("metrics nowhere", 78),
        ("plan nowhere", 78),
        ("predict nowhere --input x.npy --output y.npy", 78),
        ("probe nowhere", 2),
        ("queue ls nowhere", 78),
        pytest.param("queue ls --broker ipc:///nowhere", 3, marks=pytest.mark.slow),
        ("replay nowhere --stage 0 --step 0 --microbatch 0", 78),
        ("run ls nowhere", 2),
        ("schedule list", 0),
        ("schedule show nowhere", 2),
        ("status nowhere", 78),
        ("status", 3),
        ("story 1/1 nowhere", 78),
        ("trace export nowhere -o x.pftrace", 78),
        ("train nowhere", 78),
        ("why nowhere", 78),
        pytest.param("why --broker ipc:///nowhere", 3, marks=pytest.mark.slow),
        ("worker nowhere", 78),
        ("worker . --broker ipc:///nowhere --patience 0", 3),
    ],
)
def test_the_code_with_which_a_command_exits_is_one_that_its_help_lists(
    arguments: str, code: int, workspace: Workspace
) -> None:
    words = next(each for each in sorted(EVERY, key=len, reverse=True) if arguments.startswith(each))
    assert workspace.here(*arguments.split()) == code
    assert code in command_of(words).codes


def test_no_help_waits_for_the_imports_of_torch_or_pydantic() -> None:
    slow = "{'torch', 'pydantic'} & sys.modules.keys()"
    code = (
        f"import sys; from stageline.workers.cli.app import run; [run([*each.split(), '--help']) for each in {EVERY}]"
    )
    ended = subprocess.run([sys.executable, "-c", f"{code}; print({slow})"], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "set()"
    assert ended.stdout.count("Usage: stageline ") == len(EVERY)


def test_every_command_is_listed_once_by_its_purpose_with_a_whole_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [name for names in PURPOSES.values() for name in names]
    assert sorted(listed) == stageline.list_commands(click.Context(stageline))
    said = help_of("", capsys)
    for name in listed:
        (line,) = re.findall(rf"^  {name} +(.*)$", said, re.MULTILINE)
        assert line.endswith(".")
        assert not line.endswith("...")
    places = [said.index(f"\n{purpose}:\n") for purpose in PURPOSES]
    assert places == sorted(places)


def test_without_a_command_the_five_of_a_first_day_are_shown_and_how_to_see_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([]) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(PURPOSES[FIRST_DAY]) == 5
    assert re.findall(r"^  (\w+)  .*\.$", printed.err, re.MULTILINE) == list(PURPOSES[FIRST_DAY])
    assert "stageline --help" in printed.err


def test_the_page_of_commands_has_them_in_the_order_of_the_help() -> None:
    table = (DOCS / "reference/commands.md").read_text().partition("| command |")[2].partition("\n\n")[0]
    rows = [re.findall(r"^\| ([\w ]*) ?\| \[`(\w+)", line)[0] for line in table.splitlines() if "[`" in line]
    assert [purpose.strip() for purpose, _ in rows if purpose.strip()] == list(PURPOSES)
    assert list(dict.fromkeys(name for _, name in rows)) == [name for names in PURPOSES.values() for name in names]
