"""Commands `rotate`, `reload` and `acl` of `stageline keys`; the others are in `commands/keys.py`, which adds these."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click

from stageline.broker.errors import NotEnrolled
from stageline.broker.keys.changes import KeyChange
from stageline.broker.keys.join_line import split_key
from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.control.enrolling import address_of, demand_key, succeed
from stageline.workers.keys.key_file import VARIABLE, former_path, key_path, next_pair, put_next_in_place, read_pair
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts

from . import options
from .broker_address import address, given
from .help import Command, codes
from .output import CommandFailed, answer, say

Change = Callable[[str | None, KeyChange], tuple[str, Facts]]  # has a run's broker change its keys
_PATIENCE = 20.0  # seconds for each broker to be there


def path_of(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path:
    """Return the path of the key file NAME; the callback of that argument."""
    try:
        return key_path(value, os.environ)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(
    cls=Command,
    examples=("stageline keys rotate --broker tcp://desk:7000#k1....", "stageline keys rotate hospital"),
    groups={"Key": ("--broker",)},
    codes=codes(
        ExitCode.NO_BROKER,
        ExitCode.NOT_ADMITTED,
        failed="a former key is there, or a file cannot be written",
        refused="there is no key, others may read it, or a broker of yours is known by it",
    ),
)
@click.argument("path", metavar="[NAME]", required=False, callback=path_of)
@click.option(
    "--broker",
    "brokers",
    callback=lambda ctx, parameter, values: [str(address(dials=True)(ctx, parameter, each)) for each in values],
    metavar="URL",
    multiple=True,
    help="A broker that admits the key now, by address or join line; may be given several times.",
)
@options.as_json
def rotate(path: Path, brokers: Sequence[str], as_json: bool) -> None:
    """Put another key in the place of a key file's, with the same rights.

    Each broker named with --broker admits the other key before the file is replaced; if one does not, the file stays as
    it is, and the same command goes on later. The key of before is kept beside the file, as NAME.key.former, and what
    is printed says who must be told, and when to delete it. Without NAME, it is the key of your processes.
    """
    former = read_pair(path)
    urls = [_demand_other(address_of(given(each)), former) for each in brokers]
    following = next_pair(path, os.environ)
    for number, url in enumerate(urls):
        try:
            succeed(url, former, following.public, "stageline", _PATIENCE)
        except (BrokerUnreachable, NotEnrolled) as error:
            say(f"stageline: {number} of {len(urls)} brokers have confirmed; {path} is as before", err=True)
            raise error
    put_next_in_place(path)
    facts: Facts = {
        "schema": "keys-rotate/1",
        "key": following.public.text,
        "former": former.public.text,
        "file": str(path),
        "kept": str(former_path(path)),
        "confirmed": [masked(url) for url in urls],
        "next": list(_to_do(path, former, following, confirmed=bool(urls))),
    }
    answer(facts, as_json, partial(_show_rotated, facts))


def _demand_other(url: str, former: KeyPair) -> str:
    """Return the address. Raises `CommandFailed` if the broker there is known by the key itself, or by none."""
    demand_key(url, insecure=False)
    if _knows(url, former):
        raise CommandFailed(
            f"the broker at {masked(url)} is known by this key, and cannot take another while it runs: leave out "
            "--broker, and follow what is printed",
            ExitCode.REFUSED,
        )
    return url


def _to_do(path: Path, former: KeyPair, following: KeyPair, *, confirmed: bool) -> Iterator[str]:
    """Yield what is left to do for people."""
    old, new, kept = former.public.text, following.public.text, former_path(path)
    if confirmed:
        yield "processes that run go on with the key of before: start them again"
        yield f"then, on each of these brokers' machines: stageline keys revoke {old}"
    else:
        yield f"where another's broker admits the key of before: stageline keys admit {new}, then keys revoke {old}"
        yield (
            f'where a plan lists it as a party\'s key: write next_key = "{new}" beside it into [parties.NAME] on every '
            "side, then `stageline keys reload` on the broker's machine"
        )
    for run in _served_with(former):
        yield f"run {run.name} has a broker with the key of before: until its end, order it with {VARIABLE}={kept}"
    yield (
        "brokers of yours have the other key from their next start on (--run ID --resume). Machines that joined them "
        "refuse it: give each the new line, which `stageline keys line` prints. Invitations of before end, keys that "
        "have enrolled stay. Records at a Redis server (broker.store) are sealed with the key of before: let such runs "
        "end with it"
    )
    yield f"when nothing knows the key of before any more: rm {kept}"


def _knows(url: str, pair: KeyPair) -> bool:
    """Return True if the broker at `url` is known by the key of `pair`."""
    return split_key(url)[1] == pair.public


def _served_with(former: KeyPair) -> Iterator[Path]:
    """Yield the runs in ./runs that have a broker with this key."""
    for run in runs.all_in(options.RUNS):
        url = runs.read_broker_url(run)
        if url is not None and _knows(url, former):
            yield run


def _show_rotated(facts: Facts) -> None:
    say(f"key    {facts['key']}\nfile   {facts['file']}\nformer {facts['kept']}")
    for each in facts["next"]:
        options.tell(each)


@click.command(
    cls=Command,
    examples=(
        "stageline keys acl examples/digits --set queues.url=redis://host:6379/0",
        "stageline keys acl examples/digits --run digits-20260131-101500-1f0c",
    ),
    groups={"Run": ("--run",)},
    codes=codes(ExitCode.REFUSED, failed="the model or the data cannot be loaded"),
)
@options.config
@options.sets
@click.option(
    "--run", metavar="ID", help="Id of the run, or a pattern. Default: the runs that have the plan's run.name."
)
def acl(config: str, sets: tuple[str, ...], run: str | None) -> None:
    """Print the access list of the Redis servers that the plan CONFIG names: a user for each part of the run.

    Put a password in place of each PASSWORD-OF-..., and give each process the address with its user. The server must
    be Redis 7 or newer, or Valkey.
    """
    plan = options.plan_of(config, sets)
    from stageline.broker.transports.redis.access_list import access_list, uses
    from stageline.workers.runtime.job import prepare

    found = uses(run or f"{plan.run.name}-*", plan.queues.url, plan.broker.url, plan.broker.store)
    if not found:
        raise click.UsageError("the plan names no Redis server: neither in queues.url, broker.url nor broker.store")
    program = prepare(plan).program
    for url, use in found.items():
        say(f"stageline: the users at {url}; {use.run} stands for the id of the run", err=True)
        for line in access_list(use, program.queues.values(), program.script):
            say(line)


def reload_with(change: Change) -> click.Command:
    """Return the command, which asks for its change by `change`."""

    @click.command(
        "reload",
        cls=Command,
        examples=("stageline keys reload", "stageline keys reload runs/digits-20260131-101500-1f0c"),
        codes=codes(ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, ExitCode.REFUSED),
    )
    @options.where
    @options.as_json
    def reload(where: str | None, as_json: bool) -> None:
        """Have a run's broker read [parties] of its plan file again.

        Keys that the plan has now are admitted; those that it has no more are refused, and their connections closed.
        Workers that run keep to their own plan: they say by the party's name what they do not believe, until they are
        started again with the new one. WHERE is a run's folder, or a plan, whose newest run is meant. Default: the
        newest run in ./runs. For the user who runs the broker, on its machine.
        """
        _, told = change(where, KeyChange("reload"))
        changed = {name: told[name] for name in ("run", "parties", "changes")} | {"revoked": told["revoked_with"]}
        answer({"schema": "keys-reload/1", **changed}, as_json, lambda: _tell(changed))

    return reload


def _tell(changed: Facts) -> None:
    for each in changed["changes"]:
        say(f"{each} (here: the plan now, there: before)")
    for key in changed["revoked"]:
        say(f"{key} is refused from now on")
    if not changed["changes"]:
        say("the plan has the same parties as before")
