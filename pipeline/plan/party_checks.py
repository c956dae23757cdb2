"""Checks of the tables `parties.NAME`: each worker is of one party, each key of one, and the broker has keys, too."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from .errors import PlanError
from .keys.models import PlanTables
from .keys.parties import PartyPlan

_NAME = re.compile("[a-z][a-z0-9-]{0,31}")


def parties(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each worker without one party, and each party that cannot be told from another."""
    if plan.parties is None:
        return
    for name in plan.parties:
        if not _NAME.fullmatch(name):
            yield PlanError(
                f"parties.{name}", "a party's name has a small letter first, then small letters, digits and -"
            )
    yield from _keys(plan.parties)
    yield from _owners(plan, plan.parties)
    if plan.broker.insecure:
        yield PlanError("broker.insecure", "the plan has parties, whose keys the broker compares; leave it out")


def _keys(parties: Mapping[str, PartyPlan]) -> Iterator[PlanError]:
    owners: dict[str, str] = {}
    for name, party in parties.items():
        for field, key in (("key", party.key), ("next_key", party.next_key)):
            if key is not None and key in owners:
                yield PlanError(
                    f"parties.{name}.{field}", f"it is the key of {owners[key]}, too; each key is one party's"
                )
            elif key is not None:
                owners[key] = name


def _owners(plan: PlanTables, parties: Mapping[str, PartyPlan]) -> Iterator[PlanError]:
    count = len(plan.workers)
    found = Counter(index for party in parties.values() for index in set(party.workers))
    for name, party in parties.items():
        if (party.workers or party.script) and "work" not in party.rights:
            yield PlanError(f"parties.{name}.rights", 'it has workers; add "work"')
        if count and (beyond := [index for index in party.workers if index >= count]):
            yield PlanError(
                f"parties.{name}.workers", f"there is no worker {beyond[0]}: the plan has workers 0 to {count - 1}"
            )
    for index in range(count):
        if found[index] != 1:
            whose = " and ".join(name for name, party in parties.items() if index in party.workers) or "no party"
            yield PlanError("parties", f"worker {index} is of {whose}; give it to exactly one")
    scripts = [name for name, party in parties.items() if party.script]
    if plan.scripted and len(scripts) != 1:
        yield PlanError("parties", f"the script is of {' and '.join(scripts) or 'no party'}; set script = true in one")
    elif not plan.scripted and scripts:
        yield PlanError(f"parties.{scripts[0]}.script", "no script drives this plan; leave it out")
