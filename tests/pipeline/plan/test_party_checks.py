"""Parties of a plan: each worker is of one, each key of one, and none of it is in the plan's digest."""

import pytest

from stageline.pipeline.plan import PlanRefused, from_mapping
from support.small_plans import plan, the_error

KEYS = [f"k1.{letter}{'A' * 42}" for letter in "abc"]
HOSPITAL = {"key": KEYS[0], "workers": [0]}
LAB = {"key": KEYS[1], "workers": [1]}


def test_parties_are_outside_the_digest_and_part_of_what_is_sent() -> None:
    made = plan(parties={"hospital": HOSPITAL, "lab": {**LAB, "next_key": KEYS[2], "rights": ["work", "look"]}})
    assert made.digest() == plan().digest()
    assert made.parties is not None
    assert made.parties["lab"].keys == (KEYS[1], KEYS[2])
    assert from_mapping(made.as_mapping()).parties == made.parties


@pytest.mark.parametrize(
    ("parties", "key", "reason"),
    [
        ({"hospital": HOSPITAL}, "parties", "worker 1 is of no party; give it to exactly one"),
        ({"hospital": HOSPITAL, "lab": {**LAB, "workers": [0, 1]}}, "parties", "worker 0 is of hospital and lab"),
        ({"hospital": HOSPITAL, "lab": {**LAB, "workers": [1, 2]}}, "parties.lab.workers", "there is no worker 2"),
        ({"hospital": HOSPITAL, "lab": {**LAB, "key": KEYS[0]}}, "parties.lab.key", "it is the key of hospital, too"),
        ({"hospital": {**HOSPITAL, "next_key": KEYS[1]}, "lab": LAB}, "parties.lab.key", "it is the key of hospital"),
        (
            {"hospital": HOSPITAL, "lab": {**LAB, "rights": ["look"]}},
            "parties.lab.rights",
            'it has workers; add "work"',
        ),
        ({"hospital": HOSPITAL, "lab": {**LAB, "script": True}}, "parties.lab.script", "no script drives this plan"),
        ({"hospital": HOSPITAL, "Lab": LAB}, "parties.Lab", "a party's name has a small letter first"),
    ],
)
def test_what_parties_cannot_be_is_refused_with_the_way_out(parties: object, key: str, reason: str) -> None:
    error = the_error(parties=parties)
    assert error.key == key
    assert reason in str(error)


def test_a_key_that_is_none_is_refused_by_its_name() -> None:
    error = the_error(parties={"hospital": {**HOSPITAL, "key": "k1.short"}, "lab": LAB})
    assert error.key == "parties.hospital.key"
    assert "expected a public key, k1. and 43 characters" in str(error)


def test_a_run_with_parties_has_a_broker_with_keys() -> None:
    error = the_error(parties={"hospital": HOSPITAL, "lab": LAB}, broker={"insecure": True})
    assert error.key == "broker.insecure"


def test_a_script_is_of_one_party() -> None:
    data = {"source": "script:batches", "batch_size": 4}
    both = {"hospital": HOSPITAL, "lab": LAB}
    with pytest.raises(PlanRefused, match="the script is of no party; set script = true in one"):
        plan(parties=both, data=data, run__epochs=None)
    plan(parties={**both, "lab": {**LAB, "script": True}}, data=data, run__epochs=None)
