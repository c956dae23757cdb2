"""The ZeroMQ channel: what is known of a host that cannot be reached."""

from contextlib import closing

import pytest

from stageline.broker.control.open import open_client


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_name_that_cannot_be_resolved_is_known(host: str) -> None:
    with closing(open_client(f"tcp://{host}:5600")) as client:
        assert client.trouble.startswith(f"the name '{host}' in tcp://{host}:5600 cannot be resolved")
