"""A process is of the party whose key file its machine has, and learns by name what does not fit."""

from pathlib import Path

import pytest

from stageline.broker.keys.pairs import KeyPair
from stageline.broker.keys.parties import Parties, Party
from stageline.pipeline.errors import ExitCode
from stageline.workers.keys.key_file import new_pair
from stageline.workers.keys.keyring import own_pair
from stageline.workers.keys.party_keys import NotOfParty, party_pair

LAB = KeyPair.of_secret(bytes([7]) * 32)


class PartyMachine:
    """A home folder, and parties of which the lab is elsewhere."""

    def __init__(self, home: Path) -> None:
        self.environment = {"XDG_CONFIG_HOME": str(home)}
        self._keys = home / "stageline" / "keys"

    def key(self, name: str) -> KeyPair:
        return new_pair(self._keys / f"{name}.key")

    def refusal(self, parties: Parties, place: int | None) -> str:
        with pytest.raises(NotOfParty) as refused:
            party_pair(parties, place, self.environment)
        assert refused.value.exit_code == ExitCode.NOT_ADMITTED
        return str(refused.value)


@pytest.fixture
def machine(tmp_path: Path) -> PartyMachine:
    return PartyMachine(tmp_path)


def parties(hospital: KeyPair, *places: int) -> Parties:
    return Party("hospital", (hospital.public.text,), places), Party("lab", (LAB.public.text,), (1,))


def test_the_key_is_the_own_one_or_that_of_a_partys_name(machine: PartyMachine) -> None:
    own, named = machine.key("own"), machine.key("hospital")
    assert party_pair(parties(own, 0), 0, machine.environment) == (0, own)
    assert party_pair(parties(named, 0), 0, machine.environment) == (0, named)
    alone = {**machine.environment, "STAGELINE_KEY_FILE": str(Path(machine.environment["XDG_CONFIG_HOME"]) / "x.key")}
    with pytest.raises(NotOfParty):
        party_pair(parties(named, 0), 0, alone)


def test_a_party_with_one_place_need_not_say_which(machine: PartyMachine) -> None:
    own = machine.key("own")
    assert party_pair(parties(own, 2), None, machine.environment) == (2, own)
    said = machine.refusal(parties(own, 0, 2), None)
    assert "this machine has the key of hospital, which has workers 0 and 2: say with --index which" in said


def test_the_place_of_another_party_is_named_with_both_keys_owners(machine: PartyMachine) -> None:
    said = machine.refusal(parties(machine.key("own"), 0, 2), 1)
    assert f"worker 1 is of party lab, whose key is {LAB.public.short}" in said
    assert (
        "this machine has the key of hospital, which has workers 0 and 2: start it with --index 0 or --index 2" in said
    )
    assert "worker 5 is no party's" in machine.refusal(parties(own_pair(machine.environment), 0), 5)


def test_a_key_of_no_party_is_printed_whole_since_people_write_it_into_plans(machine: PartyMachine) -> None:
    said = machine.refusal(parties(KeyPair.of_secret(bytes([8]) * 32), 0), 1)
    assert own_pair(machine.environment).public.text in said
    assert f"lab ({LAB.public.short})" in said
    assert "write the key into [parties.lab] on every side" in said
