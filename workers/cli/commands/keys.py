"""`stageline keys`: the keys by which processes of this user are known, and who may speak to a broker of this user."""

import os
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from stageline.broker.errors import BadKey
from stageline.broker.keys.changes import KeyChange
from stageline.broker.keys.join_line import split_key
from stageline.broker.keys.pairs import VERSION, KeyPair, PublicKey
from stageline.broker.keys.parties import way_in
from stageline.broker.keys.register import Right
from stageline.pipeline.addresses import is_showable
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import broker_address, options
from stageline.workers.cli.help import CommandGroup, codes
from stageline.workers.cli.key_commands import acl, path_of, reload_with, rotate
from stageline.workers.cli.options import PATIENCE, answer_about
from stageline.workers.cli.output import CommandFailed, answer, say, show
from stageline.workers.cli.tables.answers import of_parties
from stageline.workers.control.client import Client
from stageline.workers.keys.key_file import new_pair, stored_key
from stageline.workers.keys.keyring import own_address, own_join_line, own_pair, pair_towards
from stageline.workers.keys.locked_key import LockedKey
from stageline.workers.keys.passphrase import new_passphrase
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts

DAY = 24 * 3600.0
_AT = "Address that the broker will have, as machines dial it."


class Duration(click.ParamType[float]):
    """Time as plans have it: 3600 or "24h"."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the time in seconds; fail for any other text."""
        from pydantic import TypeAdapter, ValidationError

        from stageline.pipeline.plan.keys.key_types import Seconds

        try:
            found: float = TypeAdapter(Seconds).validate_python(float(value) if _is_number(value) else value)
            return found
        except ValidationError:
            self.fail(f'{value!r} is not a time in seconds, such as 3600 or "24h"', param, ctx)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or str(value).replace(".", "", 1).isdecimal()


@click.group(cls=CommandGroup)
def keys() -> None:
    """Make and show keys; invite, admit and revoke those of others."""


@keys.command(
    examples=("stageline keys new", "stageline keys new hospital --encrypt"),
    groups={"Key": ("--encrypt",)},
    codes=codes(
        failed="there is a key already, or it cannot be written",
        refused="others may write to the folder, or there is no passphrase",
    ),
)
@click.argument("path", metavar="[NAME]", required=False, callback=path_of)
@click.option("--encrypt", is_flag=True, help="Encrypt the file with a passphrase.")
@options.as_json
def new(path: Path, encrypt: bool, as_json: bool) -> None:
    """Make a secret key, and print its public key.

    The file of the secret key is in the key folder, for you alone. Without NAME, it is the key of your processes: in
    the file that STAGELINE_KEY_FILE names, if that is set. The passphrase of an encrypted file is asked for, by each
    command that needs the key, or is in the file that STAGELINE_KEY_PASSPHRASE_FILE names.
    """
    if encrypt and not path.exists():
        _tell(new_pair(path, new_passphrase(shlex.quote(str(path)), os.environ)), path, as_json)
    else:
        _tell(new_pair(path), path, as_json)


@keys.command(
    "show",
    examples=("stageline keys show", "stageline keys show hospital --json"),
    codes=codes(refused="there is no key, or others may read it"),
)
@click.argument("path", metavar="[NAME]", required=False, callback=path_of)
@options.as_json
def show_key(path: Path, as_json: bool) -> None:
    """Print the public key of a key file: the key to give to others.

    Without NAME, it is the key of your processes. No passphrase is asked for: an encrypted file has the public key in
    clear.
    """
    _tell(stored_key(path), path, as_json)


def _tell(key: KeyPair | LockedKey, path: Path, as_json: bool) -> None:
    encrypted = isinstance(stored_key(path), LockedKey)
    facts = {"schema": "key/1", "key": key.public.text, "file": str(path), "encrypted": encrypted}
    kind = ", encrypted" if encrypted else ""
    answer(facts, as_json, lambda: say(f"key   {key.public.text}\nfile  {path}{kind}"))


_name = click.option("--as", "name", default="", metavar="NAME", help="Name for people, such as lab.")
_worker = click.option("--worker", type=click.IntRange(min=0), help="The only place in the plan for it. Default: any.")
_rights = click.option(
    "--right",
    "rights",
    type=click.Choice([str(each) for each in Right]),
    multiple=True,
    help="What it may do; may be given several times. Default: work.",
)
_codes = codes(ExitCode.NO_BROKER, ExitCode.NOT_ADMITTED, ExitCode.REFUSED)
_groups = {"Key": ("--as", "--worker", "--right")}


@keys.command(
    examples=("stageline keys invite", "stageline keys invite runs/digits-20260131-101500-1f0c --once --as lab"),
    groups={"Invitation": ("--once", "--for"), **_groups},
    codes=_codes,
)
@options.where
@click.option("--once", is_flag=True, help="One machine alone may use it: the first.")
@click.option("--for", "seconds", type=Duration(), default=DAY, help="Time until it ends. Default: 24h.")
@_name
@_worker
@_rights
@options.as_json
def invite(
    where: str | None,
    once: bool,
    seconds: float,
    name: str,
    worker: int | None,
    rights: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print a line with which another machine joins the run.

    Give it to `stageline worker --join` there, in single quotes. WHERE is a run's folder, or a plan, whose newest run
    is meant. Default: the newest run in ./runs. For the user who runs the broker, on its machine.
    """
    wanted = KeyChange("invite", "", name, worker, _chosen(rights), once, seconds)
    url, changed = _change(where, wanted)
    line = own_join_line(split_key(url)[0], changed["run"], os.environ, changed["serial"])
    facts = {"schema": "keys-invite/1", "line": line, **changed}
    answer(facts, as_json, partial(_show_line, facts))


@keys.command(
    examples=(
        "stageline keys line runs/digits-20260131-101500-1f0c > line.txt",
        "stageline keys line --at redis://redis:6379/0#digits --run digits",
    ),
    groups={"Broker": ("--at", "--run")},
    codes=_codes,
)
@options.where
@click.option("--at", "url", callback=broker_address.address(dials=False), metavar="URL", help=_AT)
@click.option("--run", "run", callback=options.run_id, metavar="ID", help="Id of the run, as `broker --run` has it.")
@options.as_json
def line(where: str | None, url: str | None, run: str | None, as_json: bool) -> None:
    """Print the join line of a broker again, as it did at its start.

    WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs. For the user who
    runs the broker: the line is derived from the key file. With --at and --run, it is that of a broker which is yet to
    be started.
    """
    if url or run:
        if where is not None or not (url and run):
            raise click.UsageError("give --at and --run together, and no WHERE: there is no run yet")
        text = own_join_line(url, run, os.environ)
        answer({"schema": "keys-line/1", "line": text, "run": run}, as_json, lambda: say(text))
        return
    folder, url = _broker_of(where)
    known = answer_about(str(folder), url, "keys")
    if known.get("parties"):
        own = own_address(url, os.environ)
        answer({"schema": "keys-line/1", "line": own, "run": known["run"]}, as_json, lambda: say(own))
        return
    standing = next((each for each in known["invitations"] if each["standing"]), None)
    if standing is None:
        raise CommandFailed(
            f"the line of run {folder.name} has ended: `stageline keys invite` prints another", ExitCode.NOT_ADMITTED
        )
    text = own_join_line(split_key(url)[0], known["run"], os.environ, standing["serial"])
    facts = {"schema": "keys-line/1", "line": text, "run": known["run"], **standing}
    answer(facts, as_json, partial(_show_line, facts))


def _show_line(facts: Facts) -> None:
    say(facts["line"])
    whom = "one machine" if facts["once"] else "any number of machines"
    shown = shlex.quote(facts["line"]) if is_showable(facts["line"]) else "@FILE, with this line (it has a password)"
    options.tell(f"good for {whom} until {_time(facts['ends'])}: stageline worker --join {shown}")


@keys.command(
    examples=("stageline keys ls", "stageline keys ls runs/digits-20260131-101500-1f0c --json"),
    codes=_codes,
)
@options.where
@broker_address.broker
@options.as_json
def ls(where: str | None, broker: str | None, as_json: bool) -> None:
    """List the keys that a run's broker knows, its invitations, and keys that knocked in vain.

    WHERE is a run's folder, or a plan, whose newest run is meant. Default: the newest run in ./runs.
    """
    facts = answer_about(where, broker, "keys")
    answer(facts, as_json, partial(_show_keys, facts))


def _show_keys(facts: Facts) -> None:
    rows = [
        (each["key"], each["name"] or "-", each["host"] or "-", *_shared(each), _standing(each))
        for each in facts["keys"]
    ]
    show(f"keys of run {facts['run']}", ("key", "name", "host", "worker", "may", "since", "is"), rows)
    if parties := facts.get("parties"):
        show("parties", ("party", "keys", "workers", "may"), of_parties(parties))
    invited = [
        (each["key"], each["name"] or "-", *_shared(each), "once" if each["once"] else "often", _time(each["ends"]))
        for each in facts["invitations"]
    ]
    show("invitations", ("key", "name", "worker", "may", "serial", "used", "ends"), invited)
    for each in facts["knocks"]:
        say(f"{each} knocked: {way_in(each, parties or ())}")


def _shared(each: Facts) -> Sequence[object]:
    """Return the cells of a key or an invitation from the place on."""
    place = "any" if each["worker"] is None else each["worker"]
    if each.get("party"):
        place = " ".join(map(str, each["places"])) or "-"
    return place, " ".join(each["rights"]), each["serial"] if "serial" in each else _time(each["since"])


def _standing(each: Facts) -> str:
    return "admitted" if each["revoked"] is None else f"revoked {_time(each['revoked'])}"


def _time(at: float | None) -> str:
    return "the run ends" if at is None else f"{datetime.fromtimestamp(at):%F %T}"


@keys.command(
    examples=(
        "stageline keys admit k1.2n8Fh0XQ",
        "stageline keys admit k1.2n8Fh0XQ --as lab --right work --right look",
    ),
    groups=_groups,
    codes=_codes,
)
@click.argument("key")
@options.where
@_name
@_worker
@_rights
@options.as_json
def admit(key: str, where: str | None, name: str, worker: int | None, rights: tuple[str, ...], as_json: bool) -> None:
    """Admit a key that has knocked, was revoked, or comes later; or change what a key may do.

    KEY is a public key, or the first characters of one that the broker knows. WHERE is a run's folder, or a plan, whose
    newest run is meant. Default: the newest run in ./runs. For the user who runs the broker, on its machine.
    """
    _, changed = _change(where, KeyChange("admit", key, name, worker, _chosen(rights)))
    answer(
        {"schema": "keys-admit/1", **changed},
        as_json,
        lambda: say(f"{changed['key']} may {' '.join(changed['rights'])}"),
    )


@keys.command(
    examples=(
        "stageline keys revoke k1.2n8Fh0XQ",
        "stageline keys revoke k1.2n8Fh0XQ runs/digits-20260131-101500-1f0c --successors",
    ),
    groups={"Key": ("--successors",)},
    codes=_codes,
)
@click.argument("key")
@options.where
@click.option("--successors", is_flag=True, help="Refuse the keys that have enrolled with it as well, and with those.")
@options.as_json
def revoke(key: str, where: str | None, successors: bool, as_json: bool) -> None:
    """Refuse a key, or an invitation, from now on, and close its connections.

    Its worker loses its place, and all places get other keys. The line that it came by ends as well: `stageline keys
    line` prints another. A key that has taken its place stays, unless --successors is given: give it if the key leaked.
    KEY is a public key, or the first characters of one that the broker knows. WHERE is a run's folder, or a plan, whose
    newest run is meant. Default: the newest run in ./runs. For the user who runs the broker, on its machine.
    """
    _, changed = _change(where, KeyChange("revoke", key, successors=successors))
    answer({"schema": "keys-revoke/1", **changed}, as_json, lambda: say(f"{changed['key']} is revoked"))
    for each in changed["revoked_with"]:
        options.tell(
            f"{each}, by which its owner could come back, is revoked, too. `stageline keys line` prints another line"
        )
    for each in changed["enrolled"]:
        options.tell(
            f"{each} has enrolled with it, and stays: `stageline keys revoke {each} --successors` ends that, too"
        )


def _chosen(rights: Sequence[str]) -> tuple[Right, ...]:
    return tuple(dict.fromkeys(map(Right, rights)))


def _change(where: str | None, wanted: KeyChange) -> tuple[str, Facts]:
    """Have the run's broker change its keys; return its address, and what was changed, with the id of the run.

    Raises:
        CommandFailed: The run has no broker with this user's key, or the broker refuses.
        BrokerUnreachable: The broker does not answer.
    """
    folder, url = _broker_of(where)
    with Client(url, lambda: runs.read_control_secret(folder), pair_towards(url, os.environ)) as client:
        try:
            if wanted.key:
                wanted = msgspec.structs.replace(wanted, key=_whole(wanted, client.ask("keys", PATIENCE)))
            facts = client.change_keys(wanted, PATIENCE)
        except ValueError as refusal:
            raise CommandFailed(str(refusal), ExitCode.USAGE) from refusal
    changed = facts["changed"]
    staying = {"enrolled": list(_came_by(changed.get("key"), facts["keys"]))}
    return url, {"run": facts["run"], **changed, "revoked_with": facts["revoked_with"], **staying}


def _came_by(text: str | None, keys: Sequence[Facts]) -> Iterator[str]:
    """Yield the admitted keys that have enrolled with a key or an invitation, their successors, and those of these."""
    named = [text] if text else []
    for found in ([each for each in keys if each["invitation"] == former] for former in named):
        named += [each["key"] for each in found]
        yield from (each["key"] for each in found if each["revoked"] is None)


def _broker_of(where: str | None) -> tuple[Path, str]:
    """Return a run's folder and the address of its broker. Raises `CommandFailed` unless that has this user's key."""
    folder = options.folder_of(where)
    url = runs.read_broker_url(folder)
    if url is None:
        raise CommandFailed(
            f"run {folder.name} has no broker at present: keys are changed while there is one", ExitCode.NO_BROKER
        )
    _demand_own(url, folder)
    return folder, url


def _demand_own(url: str, folder: Path) -> None:
    """Raise `CommandFailed` unless the broker at `url` has this user's key."""
    _, broker = split_key(url)
    if broker is None:
        raise CommandFailed(
            f"the broker of run {folder.name} has no keys: other machines do not reach it, or its plan has "
            "broker.insecure = true",
            ExitCode.USAGE,
        )
    own = own_pair(os.environ).public
    if broker != own:
        raise CommandFailed(
            f"the broker of run {folder.name} has the key {broker.text}, and yours is {own.text}: change "
            "its keys as the user who runs it, on its machine, with the same STAGELINE_KEY_FILE",
            ExitCode.REFUSED,
        )


def _whole(wanted: KeyChange, known: Facts) -> str:
    """Return the text of the key that a change names by its first characters. Raises `CommandFailed`."""
    texts = [*known["knocks"], *(each["key"] for each in (*known["keys"], *known["invitations"]))]
    found = sorted({each for each in texts if each.startswith((wanted.key, f"{VERSION}.{wanted.key}"))})
    if len(found) == 1:
        return str(found[0])
    if found:
        raise CommandFailed(
            f"{wanted.key} begins {len(found)} keys: {', '.join(found)}; write more of it", ExitCode.USAGE
        )
    try:
        return PublicKey.parse(wanted.key).text
    except BadKey as error:
        raise CommandFailed(
            f"the broker knows no key that begins with {wanted.key}, and {error}", ExitCode.USAGE
        ) from error


keys.add_command(acl)
keys.add_command(reload_with(_change))
keys.add_command(rotate)
