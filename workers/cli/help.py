"""Help of commands: options under headings, two examples, exit codes, and commands by their purpose.

No line is wider than 80 columns, or than a narrower terminal of 52 columns or more.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

import click

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.exit_codes import EXIT_CODES

from .completion import plan_keys
from .output import suggestion

MEANINGS = {code: ended.meaning for code, ended in EXIT_CODES.items()}
_ALWAYS = {ExitCode.INTERRUPTED: "interrupted"} | {
    code: MEANINGS[code] for code in (ExitCode.OK, ExitCode.FAILED, ExitCode.USAGE)
}
ARGUMENTS = "stageline.arguments"  # of the command, as they were given, in the `meta` of its context
_HEADINGS = {"--set": "Plan", "--step": "Checkpoint", "--broker": "Network"}
_HEADINGS |= dict.fromkeys(("--watch", "--every", "--json", "--help"), "Output")
_NUMBER = re.compile("(INTEGER|FLOAT)( RANGE)?$")
_VALUE = re.compile(r"(--\S+) (?!-)")  # an option before its value
_PLACES = {"Plan": 0, "Network": 2, "Output": 3}  # of headings; a command's own are at 1
_WIDEST = 26  # columns of the names of options


def codes(*more: ExitCode, **meanings: str) -> Mapping[ExitCode, str]:
    """Return the exit codes of a command with their meanings.

    Args:
        *more: Codes besides those that every command has: `OK`, `FAILED`, `USAGE` and `INTERRUPTED`.
        **meanings: By the name of a code in lower case, its meaning for this command, such as `failed="it is damaged"`.
    """
    own = {ExitCode[name.upper()]: meaning for name, meaning in meanings.items()}
    return _ALWAYS | {code: MEANINGS[code] for code in more} | own


class Command(click.Command):
    """Command whose help has its options under headings, examples and exit codes."""

    def __init__(
        self,
        *arguments: Any,
        examples: Sequence[str] = (),
        groups: Mapping[str, Sequence[str]] | None = None,
        codes: Mapping[ExitCode, str] = _ALWAYS,
        **more: Any,
    ) -> None:
        """Create the command.

        Args:
            *arguments: Arguments of `click.Command`.
            examples: Command lines, each with `stageline`.
            groups: Names of options, such as "--resume", by the heading under which they stand. Options that several
                commands share have headings of their own.
            codes: Meaning of each exit code.
            **more: Arguments of `click.Command` by name.
        """
        super().__init__(*arguments, **more)
        self.examples, self.codes = tuple(examples), codes
        self.own_options = {name: heading for heading, names in (groups or {}).items() for name in names}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; the message about an unknown option that is a key of the plan says how to set it."""
        ctx.meta[ARGUMENTS] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            key = error.option_name.lstrip("-").replace("-", "_")
            named = [each for each in self._settable() if key in (each, each.rpartition(".")[2])]
            if not named:
                raise
            ways = " or ".join(f"--set {each}=VALUE" for each in named)
            raise click.UsageError(f"there is no option {error.option_name}: a plan has it as {ways}", ctx) from error

    def _settable(self) -> Iterator[str]:
        """Yield the keys of a plan if the command takes --set."""
        if any("--set" in each.opts for each in self.params):
            yield from plan_keys()

    def heading(self, option: click.Parameter) -> str:
        """Return the heading of an option; "Options" if it has none."""
        headings = _HEADINGS | self.own_options
        return next((headings[name] for name in option.opts if name in headings), "Options")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, each under its heading."""
        found: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)) is not None:
                found.setdefault(self.heading(option), []).append((_NUMBER.sub("N", record[0]), record[1]))
        for heading in sorted(found, key=lambda each: _PLACES.get(each, 1)):
            with formatter.section(heading):
                formatter.write_dl(found[heading], col_max=_WIDEST)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples and exit codes."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for each in self.examples for line in _fitted(each, formatter)))
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), self.codes[code]) for code in sorted(self.codes)])


def _fitted(example: str, formatter: click.HelpFormatter) -> list[str]:
    r"""Return the lines of a command line, all but the last of which end with a "\" that a shell takes."""
    room = formatter.width - formatter.current_indent - len(" \\")
    joined = _VALUE.sub("\\1\xa0", example)  # both stay on one line
    lines = wrap(joined, room, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in (*(f"{line} \\" for line in lines[:-1]), lines[-1])]


class CommandGroup(Command, click.Group):
    """Command that holds others, listed by their purpose; its examples are the first ones of those that it holds."""

    command_class = Command

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command; its first example and its exit codes are the group's, too."""
        super().add_command(cmd, name)
        if isinstance(cmd, Command):
            self.examples, self.codes = (*self.examples, *cmd.examples[:1]), {**cmd.codes, **self.codes}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section of commands for each purpose."""
        listed = self.by_purpose(ctx)
        widest = max(len(name) for names in listed.values() for name in names)
        for purpose, names in listed.items():
            with formatter.section(purpose):
                formatter.write_dl([(name.ljust(widest), said) for name, said in self.summaries(ctx, names)])

    def by_purpose(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        """Return the names of the commands by the heading of the help that lists them: all under "Commands"."""
        return {"Commands": self.list_commands(ctx)}

    def summaries(self, ctx: click.Context, names: Iterable[str]) -> list[tuple[str, str]]:
        """Return the named commands, each with the first sentence of its help."""
        found = ((name, self.get_command(ctx, name)) for name in names)
        return [(name, command.get_short_help_str(limit=200)) for name, command in found if command is not None]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command; an unknown name fails with a suggestion."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            path = f"{ctx.command_path} {name}".removeprefix("stageline ")
            meant = " or ".join(self._inner(ctx, name))
            hint = f"did you mean {meant}?" if meant else suggestion(name, self.list_commands(ctx))
            ctx.fail(f"there is no command {path}; {hint}")
        return super().resolve_command(ctx, args)

    def _inner(self, ctx: click.Context, name: str) -> Iterator[str]:
        """Yield the commands of this name, each with the group that holds it."""
        for outer in self.list_commands(ctx):
            found = self.get_command(ctx, outer)
            if isinstance(found, click.Group) and name in found.commands:
                yield f"{outer} {name}"
