"""Values in a vault: only its own secret, context and name open one."""

import os

import pytest

from stageline.broker.errors import BadMessage
from stageline.broker.keys.single_use import Vault

SECRET = bytes(range(32))


def vault(secret: bytes = SECRET, *context: str) -> Vault:
    return Vault(secret, context or ("store", "run"), os.urandom)


def test_a_value_opens_under_its_name_and_never_looks_the_same() -> None:
    first, second = (vault().seal(b"loss 4", b"0.5") for _ in range(2))
    assert vault().open(b"loss 4", first) == vault().open(b"loss 4", second) == b"0.5"
    assert first[24:] != second[24:]


@pytest.mark.parametrize("other", [vault(bytes(32)), vault(SECRET, "store", "another"), vault(SECRET, "storerun")])
def test_another_secret_or_context_opens_nothing_and_is_told_apart(other: Vault) -> None:
    assert other.check != vault().check == vault().check
    with pytest.raises(BadMessage):
        other.open(b"loss 4", vault().seal(b"loss 4", b"0.5"))


def test_what_was_cut_altered_or_moved_does_not_open() -> None:
    sealed = vault().seal(b"loss 4", b"0.5")
    spoilt = [sealed[:end] for end in range(len(sealed))]
    spoilt += [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in range(len(sealed))]
    for value in spoilt:
        with pytest.raises(BadMessage):
            vault().open(b"loss 4", value)
    with pytest.raises(BadMessage):
        vault().open(b"loss 5", sealed)
