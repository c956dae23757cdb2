"""Which channel an address opens."""

import pytest

from stageline.broker.errors import AddressUnusable
from stageline.broker.transports.open import open_client


@pytest.mark.parametrize("url", ["tcp://nowhere", "redis://127.0.0.1:6379/0?nonsense=1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(AddressUnusable, match=r"cannot use tcp://nowhere|cannot reach the broker"):
        open_client(url)
