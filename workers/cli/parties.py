"""`stageline keys reload`, which `commands/keys.py` adds to the other commands about keys; and rows of parties."""

from collections.abc import Callable, Sequence

import click

from stageline.broker.keys.orders import KeyOrder
from stageline.broker.keys.pairs import short
from stageline.pipeline.errors import ExitCode
from stageline.workers.runs.folder import Facts

from . import options
from .help import Command, codes
from .output import answer, say

Give = Callable[[str | None, KeyOrder], tuple[str, Facts]]  # gives an order to a run's broker


def reload_with(give: Give) -> click.Command:
    """Return the command, which gives its order by `give`."""

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
        _, told = give(where, KeyOrder("reload"))
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


def of_parties(parties: Sequence[Facts]) -> list[tuple[str, ...]]:
    """Return a row for each party, of its name, its keys, its places and its rights."""
    return [
        (
            each["name"],
            " ".join(map(short, each["keys"])),
            " ".join(map(str, each["places"])) or "-",
            " ".join(each["rights"]),
        )
        for each in parties
    ]


def trusted(keys: Facts) -> str:
    """Return the level of a run with keys: who is trusted with what the queues carry, for people."""
    parties = keys.get("parties") or []
    if not parties:
        return "level 1: the broker is trusted with what the queues carry"
    owned = (f"{each['name']} has {_places(each['workers'])}" for each in parties)
    return f"level 2, parties in the plan: {'; '.join(owned)}. The broker cannot read what the queues carry"


def _places(places: Sequence[int]) -> str:
    return f"worker{'s' * (len(places) > 1)} {' and '.join(map(str, places))}" if places else "no worker"
