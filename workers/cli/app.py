"""Command line: finds a command by its name, runs it, and turns its errors into a message and an exit code."""

import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import click
import msgspec
from click.shell_completion import add_completion_class

from stageline.broker.transports.sockets.descriptors import raise_descriptor_limit
from stageline.pipeline.errors import Bug, ExitCode, StagelineError
from stageline.pipeline.printable import is_utf8

from .completion import SHELLS
from .help import MEANINGS, CommandGroup
from .output import CommandFailed, as_facts, message_of, say

_FILES = frozenset(file.stem for file in Path(__file__).with_name("commands").glob("[a-z]*.py"))
_TOGETHER = {  # commands of a file that has another name than theirs
    name: file
    for file, names in {
        "processes": ("broker", "trial", "worker"),
        "queries": ("status", "story", "why"),
        "trained": ("eval", "export", "predict"),
    }.items()
    for name in names
}
FIRST_DAY = "First day"
PURPOSES: dict[str, Sequence[str]] = {
    FIRST_DAY: ("doctor", "init", "plan", "train", "status"),
    "Run on several machines": ("broker", "worker", "relay", "keys", "allow"),
    "Look into a run": (
        "run",
        "top",
        "why",
        "timetable",
        "trace",
        "report",
        "dashboard",
        "story",
        "queue",
        "microbatch",
        "stack",
        "logs",
        "metrics",
    ),
    "Checkpoints and weights": ("checkpoint", "export", "predict", "eval"),
    "Tools": ("schedule", "audit", "probe", "replay", "bundle", "errors"),
}
_ASKS_FOR_HELP = frozenset(["--help", "-h", "--version"])
_BUG = Bug.coded(
    "stageline: this is a bug in stageline. Please report it with the traceback above and the logs in the run's folder."
)


def _commands(files: Iterable[str]) -> dict[str, click.Command]:
    """Return the commands that these files of the folder `commands` define, by name."""
    modules = [import_module(f".commands.{file}", __package__) for file in files]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, click.Command)]
    inner = [each for command in found for each in getattr(command, "commands", {}).values()]
    return {str(each.name): each for each in found if each not in inner}


class Commands(CommandGroup):
    """Group of the commands in the folder `commands`. Of these files, that of the command is imported alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without any, fail with the commands of a first day."""
        if not args and not ctx.resilient_parsing:
            ctx.fail(self._first_day(ctx))
        return super().parse_args(ctx, args)

    def _first_day(self, ctx: click.Context) -> str:
        formatter = ctx.make_formatter()
        formatter.write_usage("stageline", "COMMAND [ARGS]...")
        with formatter.section(FIRST_DAY):
            formatter.write_dl(self.summaries(ctx, PURPOSES[FIRST_DAY]))
        formatter.write("\nAll commands: stageline --help\nOne of them:  stageline COMMAND --help")
        return formatter.getvalue()

    def by_purpose(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        """Return the names of the commands by their purpose, in the order in which they are needed."""
        listed = {name for names in PURPOSES.values() for name in names}
        rest = [name for name in self.list_commands(ctx) if name not in listed]
        return PURPOSES | ({"Others": rest} if rest else {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands that are not hidden, sorted."""
        return sorted(name for name, command in _commands(_FILES).items() if not command.hidden)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command `cmd_name`, None if there is none."""
        file = _TOGETHER.get(cmd_name, cmd_name)
        return _commands([file] if file in _FILES else _FILES).get(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Invoke the command; raise `CommandFailed` for a `SystemExit` of the user's code."""
        try:
            return super().invoke(ctx)
        except SystemExit as error:  # click has an exception of its own to exit with: this is from a user's code
            code = "" if error.code is None else repr(error.code)
            raise CommandFailed(
                f"the model, the data or a metric raised SystemExit({code})", ExitCode.REFUSED
            ) from error


def _demand_utf8(arguments: Sequence[str]) -> None:
    """Raise `CommandFailed` for a path that records and messages, which are UTF-8, cannot hold."""
    for before, argument in pairwise(("", *arguments)):
        after = f" after {before}" if before.startswith("-") else ""
        _demand_path(f"the argument{after}", argument, "give another; if it names a file or folder, rename that")
    if not _ASKS_FOR_HELP.isdisjoint(arguments):  # which needs no folder
        return
    with suppress(OSError):  # there is none for temporary files: others tell
        _demand_path("the folder for temporary files", gettempdir(), "set TMPDIR to another, such as /tmp")
    with suppress(OSError):  # the current folder is gone: others tell
        _demand_path("the current folder", os.getcwd(), "rename it, or run the command in another (cd)")


def _demand_path(what: str, path: str, way_out: str) -> None:
    if not is_utf8(path):
        raise CommandFailed(f"{what}, {path!a}, is not UTF-8: {way_out}", ExitCode.USAGE)


for _shell in SHELLS:
    add_completion_class(_shell)


@click.command(
    cls=Commands,
    codes=MEANINGS,
    groups={"Options": ("--debug", "--version", "--help")},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of every error.")
@click.version_option(package_name="stageline", prog_name="stageline")
def stageline() -> None:
    """Train one PyTorch model on machines that share nothing but message queues.

    `stageline COMMAND --help` shows the options of a command, examples and exit codes.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    raise_descriptor_limit()
    try:
        _demand_utf8(arguments)
        return stageline.main(list(arguments), prog_name="stageline", standalone_mode=False) or ExitCode.OK
    except click.ClickException as error:
        _print_usage_error(error)
        return _failed(arguments, error, error.format_message(), error.exit_code)
    except click.Abort:
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - what is not expected is a bug, whatever it is
        # ZeroMQ's error, such as too many open files, is no `OSError`; the command may have imported zmq.
        of_zmq = sys.modules["zmq"].ZMQError if "zmq" in sys.modules else OSError
        expected = isinstance(error, (StagelineError, OSError, of_zmq))
        if not expected or "--debug" in arguments:
            traceback.print_exception(error)
        message = f"stageline: {message_of(error)}" if expected else _BUG
        say(message, err=True)
        code = error.exit_code if isinstance(error, StagelineError) else ExitCode.FAILED
        return _failed(arguments, error, message.removeprefix("stageline: "), code)


def _failed(arguments: Sequence[str], error: Exception, message: str, code: int) -> int:
    """Print the error as one line of JSON if --json is given and nothing was printed; return `code`.

    With --json a command's stdout is one line of JSON, also if it fails.
    """
    if "--json" in arguments and not getattr(error, "answered", False):
        click.echo(msgspec.json.encode(as_facts(error, message, code)))
    return code


def _print_usage_error(error: click.ClickException) -> None:
    message = error.format_message()
    if message.startswith("Usage:"):  # no command was given: print the help alone
        say(message, err=True)
        return
    if isinstance(error, click.MissingParameter) and error.param and error.param.name == "run":
        message += " `stageline run ls` lists those in ./runs"
    say(f"stageline: {message[:1].lower()}{message[1:]}", err=True)
    if isinstance(error, click.UsageError) and error.ctx is not None:
        say(f"See {error.ctx.command_path} --help", err=True)
