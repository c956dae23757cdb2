"""Choice of the party as which a process of this machine takes part in a run, by the key files that it has.

own.key, or the file in STAGELINE_KEY_FILE    if a party has that key in the plan
hospital.key                                  for party hospital; not looked at if STAGELINE_KEY_FILE is set
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.keys.parties import Parties, Party, parties_of, party_at, party_with
from stageline.pipeline.addresses import masked, parted
from stageline.pipeline.errors import ExitCode, StagelineError

from .key_file import VARIABLE, key_path, read_pair, stored_key
from .keyring import own_pair, pair_towards

if TYPE_CHECKING:  # pydantic takes long to load
    from stageline.pipeline.plan import Plan


class NotOfParty(StagelineError):
    """Error that this machine does not have the key of the party whose place it is to take.

    Mend: Start the worker with the index of a place of its own party, or with that party's key file.

    Example: worker 1 is of party lab, whose key is k1.2n8Fh0XQ..., and this machine has the key of hospital, which has
    worker 0: start it with --index 0, or on a machine of lab
    """

    error_code = "SL616"
    exit_code = ExitCode.NOT_ADMITTED


def placed(plan: "Plan", url: str, place: int | None, environment: Mapping[str, str]) -> tuple[int, KeyPair]:
    """Return the place that a worker of a plan with parties takes at the broker at `url`, and the pair of its party.

    Args:
        plan: Plan of the worker.
        url: Address of the broker.
        place: Index of the wanted place; None if this machine's key says which.
        environment: Variables, which may say where the key file is.

    Raises:
        NotOfParty, KeyUnusable: As of `party_pair`; the address has no key.
        PlanRefused: A key of the plan is none.
    """
    if not parted(url)[1]:
        raise NotOfParty(
            f"the plan has parties, and {masked(url)} has no key: write the address that the broker prints, with its "
            "key. A broker that no other machine reaches has none: let it listen where others do, or drop [parties]"
        )
    return party_pair(parties_of(plan), place, environment)


def pair_of_place(plan: "Plan", url: str, place: int, environment: Mapping[str, str]) -> KeyPair | None:
    """Return the pair with which the process in a place dials the broker at `url`; None if the address has no key.

    Raises as `placed` and `pair_towards`.
    """
    if plan.parties is None or not parted(url)[1]:
        return pair_towards(url, environment)
    return placed(plan, url, place, environment)[1]


def party_pair(parties: Parties, place: int | None, environment: Mapping[str, str]) -> tuple[int, KeyPair]:
    """Return the place that a process takes, and the pair of its party.

    Args:
        parties: Parties of the plan.
        place: Index of the wanted place; None if this machine's key says which.
        environment: Variables, which may say where the key file is.

    Raises:
        NotOfParty: This machine does not have the key of the party, or it is not said which place is meant.
        KeyUnusable: A key file cannot be made or read.
    """
    here = parties_here(parties, environment)
    if not here:
        own = next((key for _, key in _files(parties, environment)), None) or own_pair(environment).public
        raise NotOfParty(_unlisted(parties, place, own))
    if place is None:
        place, path = _only_place(here)
        return place, read_pair(path, environment)
    for party, path in here:
        if place in party.places:
            return place, read_pair(path, environment)
    wanted, (party, _) = party_at(parties, place), here[0]
    whose = "no party's" if wanted is None else f"of party {wanted.name}, whose key is {wanted.shown}"
    options = " or ".join(f"--index {each}" for each in party.places) or "another plan"
    elsewhere = f", or on a machine of {wanted.name}" if wanted is not None else ""
    raise NotOfParty(
        f"worker {place} is {whose}, and this machine has the key of {party.name}, which has {party.workers}: start it "
        f"with {options}{elsewhere}"
    )


def parties_here(parties: Parties, environment: Mapping[str, str]) -> Sequence[tuple[Party, Path]]:
    """Return the parties whose keys this machine has, each with its key file. Raises `KeyUnusable`."""
    found = ((party_with(parties, key.text), path) for path, key in _files(parties, environment))
    return [(party, path) for party, path in found if party is not None]


def _only_place(here: Sequence[tuple[Party, Path]]) -> tuple[int, Path]:
    """Return the place and the key file if there is but one place. Raises `NotOfParty`."""
    places = [(place, path) for party, path in here for place in party.places]
    if len({place for place, _ in places}) == 1:
        return places[0]
    names = " and ".join(f"{party.name}, which has {party.workers}" for party, _ in here)
    raise NotOfParty(f"this machine has the key of {names}: say with --index which worker this process is")


def _files(parties: Parties, environment: Mapping[str, str]) -> Iterator[tuple[Path, PublicKey]]:
    """Yield the key files that there are, with their public keys, for which no passphrase is needed."""
    names = [] if environment.get(VARIABLE) else [each.name for each in parties]
    with suppress(RuntimeError):  # this user has no home folder, which `own_pair` explains
        for name in (None, *names):
            path = key_path(name, environment)
            if path.exists():
                yield path, stored_key(path).public


def _unlisted(parties: Parties, place: int | None, own: PublicKey) -> str:
    """Return the text for a machine whose key is of no party."""
    wanted = None if place is None else party_at(parties, place)
    known = ", ".join(f"{each.name} ({each.shown})" for each in parties)
    name = "NAME" if wanted is None else wanted.name
    return (
        f"the key of this machine, {own.text}, is of no party in the plan, which has {known}. Set {VARIABLE} to "
        f"the key file of party {name}, or write the key into [parties.{name}] on every side"
    )
