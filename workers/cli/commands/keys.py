"""`stageline keys`: makes and shows the keys by which processes of this user are known."""

import os
from pathlib import Path

import click

from stageline.broker.keys.pairs import KeyPair
from stageline.workers.cli import options
from stageline.workers.cli.help import CommandGroup, codes
from stageline.workers.cli.output import answer, say
from stageline.workers.cli.redis_access import acl
from stageline.workers.keys.key_file import key_path, new_pair, read_pair


def _path(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path:
    try:
        return key_path(value, os.environ)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.group(cls=CommandGroup)
def keys() -> None:
    """Make and show keys, by which processes are known to each other."""


@keys.command(
    examples=("stageline keys new", "stageline keys new hospital"),
    codes=codes(
        failed="there is a key already, or it cannot be written",
        refused="others may write to the folder",
    ),
)
@click.argument("path", metavar="[NAME]", required=False, callback=_path)
@options.as_json
def new(path: Path, as_json: bool) -> None:
    """Make a secret key, and print its public key.

    The file of the secret key is in the key folder, for you alone. Without NAME, it is the key of your processes: in
    the file that STAGELINE_KEY_FILE names, if that is set.
    """
    _tell(new_pair(path), path, as_json)


@keys.command(
    examples=("stageline keys show", "stageline keys show hospital --json"),
    codes=codes(refused="there is no key, or others may read it"),
)
@click.argument("path", metavar="[NAME]", required=False, callback=_path)
@options.as_json
def show(path: Path, as_json: bool) -> None:
    """Print the public key of a key file: the key to give to others.

    Without NAME, it is the key of your processes.
    """
    _tell(read_pair(path), path, as_json)


def _tell(pair: KeyPair, path: Path, as_json: bool) -> None:
    facts = {"schema": "key/1", "key": pair.public.text, "file": str(path)}
    answer(facts, as_json, lambda: say(f"key   {pair.public.text}\nfile  {path}"))


keys.add_command(acl)
