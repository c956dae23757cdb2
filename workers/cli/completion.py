"""Words that a shell completes: folders of runs, plans, stages, steps, addresses, keys of a plan.

Nothing that is slow to import is needed: torch never, pydantic for the keys of a plan alone. Each function returns
what the word that was begun may become; `ctx.params` has the words before it.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, split_arg_string

from stageline.pipeline import addresses
from stageline.workers.runs import folder as runs_folder

Items = list[CompletionItem[str]]

_RUNS = "runs"
_PLAN_FILE = "stageline.toml"
_OF_A_PLAN = re.compile(rb"^\s*\[?model\b", re.MULTILINE)  # other files are TOML, too
_MOST = 65_536  # bytes of a file that are looked at
_OPEN = "=./:"  # no word ends with these: no space goes after them

# Unlike click's, it passes the whole line: bash cuts words at = and :, which are in keys and addresses.
_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' found type value
    COMPREPLY=()
    for found in $(env COMP_WORDS="${COMP_LINE:0:COMP_POINT}" %(complete_var)s=bash_complete $1 2> /dev/null); do
        IFS=',' read -r type value <<< "$found"
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            *) COMPREPLY+=("$value"); [[ $value == *[=./:] ]] && compopt -o nospace ;;
        esac
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """Completion for bash, also of words with = and :."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one that was begun, and that one."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        begun = "" if line[-1:].isspace() else words.pop()
        return words[1:], begun

    def get_completions(self, args: list[str], incomplete: str) -> Items:
        """Return what `incomplete` may become, from its last = or : on, where the word begins for bash."""
        value = incomplete.partition("=")[2] if incomplete.startswith("-") else incomplete
        before = value[: max(value.rfind("="), value.rfind(":")) + 1]
        found = super().get_completions(args, incomplete)
        return [CompletionItem(each.value.removeprefix(before), type=each.type) for each in found]


class Zsh(ZshComplete):
    """Completion for zsh, with no space after words that go on."""

    source_template = ZshComplete.source_template.replace(
        "compadd -U -V unsorted -a completions",
        "[[ ${completions[-1]} == *[=./:] ]] && compadd -U -S '' -V unsorted -a completions || "
        "compadd -U -V unsorted -a completions",
    )


SHELLS = (Bash, Zsh)  # in place of click's


def runs(ctx: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """Return folders of runs, the newest first: those in ./runs, or in the folder that `begun` names."""
    return _fitting(_run_folders(begun), begun, files=True)


def run_ids(ctx: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """Return the ids of the runs in ./runs, the newest first."""
    return _fitting((each.name for each in reversed(runs_folder.all_in(Path(_RUNS)))), begun)


def plans(ctx: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """Return plan files, and folders with one, in this folder or the one that `begun` names."""
    return _fitting(_plans(begun), begun, files=True)


def runs_and_plans(ctx: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """Return folders of runs, then plans."""
    return _fitting([*_run_folders(begun), *_plans(begun)], begun, files=True)


def stages(ctx: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """Return the numbers of the stages of the run or plan that the command names."""
    model = _tables(_named(ctx, "where")).get("model", {})
    cut = model.get("cut")
    count = len(cut) + 1 if isinstance(cut, list) else model.get("stages")
    return _fitting(map(str, range(count if isinstance(count, int) else 0)), begun)


def steps(ctx: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """Return the steps of which the run that the command names has snapshots, the newest first."""
    named = _named(ctx, "run")
    folder = Path(named) if named else runs_folder.newest_in(Path(_RUNS)) or Path(_RUNS)
    found = {int(each.name.rpartition("-")[2]) for each in folder.glob("checkpoints/stage-*/step-[0-9]*")}
    return _fitting(map(str, sorted(found, reverse=True)), begun)


def broker_addresses(ctx: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """Return the schemes of addresses of a broker."""
    return _fitting((f"{scheme}://" for scheme in addresses.broker_schemes()), begun)


def settings(ctx: click.Context, parameter: click.Parameter, begun: str) -> Items:
    """Return tables of a plan, their keys once a table is named, and the values of a key that has few."""
    known = plan_keys()
    key, is_set, _ = begun.partition("=")
    if is_set:
        return _fitting((f"{key}={value}" for value in _values(key, known.get(key, {}))), begun)
    whole = [f"{each}=" for each in known]
    if "." in begun:
        return _fitting(whole, begun)
    return _fitting(dict.fromkeys(f"{each.partition('.')[0]}." if "." in each else each for each in whole), begun)


def plan_keys() -> dict[str, Mapping[str, Any]]:
    """Return every key of a plan with its schema; stages and workers stand as number 0. Imports pydantic."""
    from stageline.pipeline.plan.keys.models import plan_schema

    return dict(_keys(plan_schema()))


def _fitting(words: Iterable[str], begun: str, *, files: bool = False) -> Items:
    """Return the words that begin with `begun`; with `files`, the shell's own files if there are none."""
    found = [CompletionItem(word) for word in words if word.startswith(begun)]
    return found or ([CompletionItem(begun, type="file")] if files else [])


def _named(ctx: click.Context, argument: str) -> str | None:
    """Return the first argument; click leaves it in `ctx.args` if the last word is an option without its value."""
    return ctx.params.get(argument) or next(iter(ctx.args), None)


def _run_folders(begun: str) -> list[str]:
    place = begun.rpartition("/")[0] or _RUNS
    return [f"{place}/{each.name}" for each in reversed(runs_folder.all_in(Path(place)))]


def _plans(begun: str) -> Iterator[str]:
    place = begun[: begun.rfind("/") + 1]
    with suppress(OSError):
        for each in sorted(Path(place or ".").iterdir()):
            if (each / _PLAN_FILE).is_file() or (each.suffix == ".toml" and _is_plan(each)):
                yield f"{place}{each.name}"


def _is_plan(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as opened:
        return _OF_A_PLAN.search(opened.read(_MOST)) is not None
    return False


def _tables(where: str | None) -> Mapping[str, Any]:
    """Return the tables of the plan of a run, or of a plan; without `where`, of the newest run or the plan here."""
    place = Path(where) if where else runs_folder.newest_in(Path(_RUNS)) or Path()
    with suppress(OSError, ValueError):
        if runs_folder.is_run(place):
            recorded: dict[str, Any] = json.loads((place / runs_folder.PLAN).read_bytes())
            return recorded
        return tomllib.loads((place / _PLAN_FILE if place.is_dir() else place).read_text())
    return {}


def _keys(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every key of `schema` with its own."""
    for table, facts in schema["properties"].items():
        numbered = list(facts.get("patternProperties", {}).values())
        refs = [each["$ref"] for each in (facts, *facts.get("anyOf", ()), *numbered) if "$ref" in each]
        if not refs:
            yield table, facts
        for key, inner in (schema["definitions"][refs[0].rpartition("/")[2]]["properties"] if refs else {}).items():
            yield f"{table}.{'0.' if numbered else ''}{key}", inner


def _values(key: str, facts: Mapping[str, Any]) -> Iterator[str]:
    if key == "queues.url":
        yield from (f"{scheme}://" for scheme in addresses.queue_schemes())
    if key == "broker.url":
        yield from (f"{scheme}://" for scheme in addresses.broker_schemes())
    for each in (facts, *facts.get("anyOf", ())):
        yield from each.get("enum", ("true", "false") if each.get("type") == "boolean" else ())
