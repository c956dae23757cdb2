"""Which addresses a plan may name, which of them other machines can reach, and that no password of theirs is shown."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline import addresses
from stageline.pipeline.addresses import masked


@pytest.mark.parametrize(
    "url",
    [
        *addresses.queue_schemes().values(),
        *addresses.broker_schemes().values(),
        "tcp://*:0",
        "tcp://[::1]:5600",
        "tcp://*:5600-5609",
    ],
)
def test_the_examples_are_addresses(url: str) -> None:
    assert addresses.fault(url, addresses.queue_schemes()) is None


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://h", ""),
        ("tcp", ""),
        ("tcp://h", "tcp:// goes with a host and a port"),
        ("tcp://h:\u0667\u0669", "tcp:// goes with a host and a port"),
        ("tcp://h:65536", "a port is at most 65535"),
        ("tcp://h:65530-65536", "a port is at most 65535"),
        ("tcp://h:5609-5600", "a range of ports ascends from 1 on, such as 5600-5609"),
        ("tcp://h:0-9", "a range of ports ascends from 1 on, such as 5600-5609"),
        ("tcp://h:*-9", "a range of ports ascends from 1 on, such as 5600-5609"),
        ("redis://:6379/0", "a host is missing"),
        ("unix://", "the path of a socket is missing"),
    ],
)
def test_what_is_no_address_has_its_fault_named(url: str, fault: str) -> None:
    assert addresses.fault(url, addresses.queue_schemes()) == fault


@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("tcp://0.0.0.0:5600", True),
        ("tcp://*:5600", True),
        ("tcp://*:5600-5609", True),
        ("tcp://broker.example:5600", True),
        ("tcp://127.0.0.1:5600", False),
        ("tcp://localhost:5600", False),
        ("ipc:///tmp/x", False),
    ],
)
def test_only_an_address_beyond_the_loopback_is_open_to_others(url: str, is_open: bool) -> None:
    assert addresses.open_to_others(url) is is_open


@pytest.mark.parametrize(
    ("url", "lacking"),
    [
        ("redis://10.0.0.9:6379/0", ("a password", "TLS")),
        ("redis://trainer@10.0.0.9:6379/0", ("a password", "TLS")),
        ("redis://:secret@redis.example:6379/0#name", ("TLS",)),
        ("redis://redis.example?password=secret", ("TLS",)),
        ("rediss://redis.example", ("a password",)),
        ("rediss://trainer:secret@redis.example:6379/0", ()),
        ("rediss://redis.example?ssl_certfile=/mine.pem&ssl_keyfile=/mine.key", ()),
        ("redis://127.0.0.1:6379/0", ()),
        ("redis://[::1]:6379/0", ()),
        ("redis://localhost", ()),
        ("unix:///run/redis.sock?db=0", ()),
        ("tcp://10.0.0.9:5600", ()),
        ("sqlite", ()),
    ],
)
def test_a_redis_server_beyond_the_loopback_lacks_a_password_or_tls(url: str, lacking: tuple[str, ...]) -> None:
    assert addresses.lacking_protection(url) == lacking


URL = "redis://trainer:open-sesame@redis.example:6379/0"
UNCLEAR = "redis://..."


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "redis://trainer@redis.example:6379/0"),
        ("redis://:secret@host:6379/0", "redis://host:6379/0"),
        ("rediss://host/0?ssl_ca_certs=/ca.pem&ssl_password=secret", "rediss://host/0?ssl_ca_certs=/ca.pem"),
        ("redis://host?password=secret", "redis://host"),
        ("redis://host?p%61ssword=secret&db=3", "redis://host?db=3"),
        ("unix:///run/redis.sock?db=1&password=s@cret", "unix:///run/redis.sock?db=1"),
        ("unix://trainer:secret@/run/redis.sock", "unix://trainer@/run/redis.sock"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://trainer:secret", UNCLEAR),  # the host is missing
        ("redis://:sec/ret@host", UNCLEAR),
        ("redis://:12?34@host", UNCLEAR),
        ("redis://:sec#ret@host", UNCLEAR),
        ("reddis://:secret@host", "reddis://host"),
        ("ipc://@here", "ipc://@here"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("memory://", "memory://"),
        ("redis:///0", "redis:///0"),
        ("no address", "no address"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert masked(shown) == shown


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1))
def test_no_password_is_shown(password: str) -> None:
    assert masked(f"redis://trainer:{quote(password, safe='')}@host:6379/0") == "redis://trainer@host:6379/0"
    assert masked(f"redis://trainer:{password}@host:6379/0") in ("redis://trainer@host:6379/0", UNCLEAR)
