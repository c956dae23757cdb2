"""Which addresses a plan may name, and which of them other machines can reach."""

import pytest

from stageline.pipeline.plan import urls


@pytest.mark.parametrize("url", [*urls.QUEUES.values(), *urls.BROKER.values(), "tcp://*:0", "tcp://[::1]:5600"])
def test_the_examples_are_addresses(url: str) -> None:
    assert urls.fault(url, {**urls.QUEUES, **urls.BROKER}) is None


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://h", ""),
        ("tcp", ""),
        ("tcp://h", "tcp:// goes with a host and a port"),
        ("tcp://h:65536", "a port is at most 65535"),
        ("redis://:6379/0", "a host is missing"),
        ("unix://", "the path of a socket is missing"),
    ],
)
def test_what_is_no_address_has_its_fault_named(url: str, fault: str) -> None:
    assert urls.fault(url, urls.QUEUES) == fault


@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("tcp://0.0.0.0:5600", True),
        ("tcp://*:5600", True),
        ("tcp://broker.example:5600", True),
        ("tcp://127.0.0.1:5600", False),
        ("tcp://localhost:5600", False),
        ("ipc:///tmp/x", False),
    ],
)
def test_only_an_address_beyond_the_loopback_is_open_to_others(url: str, is_open: bool) -> None:
    assert urls.open_to_others(url) is is_open
