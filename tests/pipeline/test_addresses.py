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


KEY = "k1.j0DFrbaPJWJK5bIU6nZ6bslNgp09e14a0bpvPiE4KF8"


def test_an_address_that_ends_with_a_key_is_an_address_as_it_is_without() -> None:
    keyed = f"tcp://*:5600#{KEY}"
    assert addresses.parted(keyed) == ("tcp://*:5600", KEY)
    assert addresses.parted("redis://host/0#desk") == ("redis://host/0#desk", "")
    assert addresses.fault(keyed, addresses.broker_schemes()) is None
    assert addresses.open_to_others(keyed)
    assert not addresses.open_to_others(f"tcp://127.0.0.1:5600#{KEY}")
    assert addresses.host_of(keyed) == "*"
    assert addresses.dialled(keyed, "desk") == f"tcp://desk:5600#{KEY}"
    assert not addresses.transport_of(keyed).has_free_port(keyed)
    assert masked(keyed) == "tcp://*:5600#k1..."


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (f"{KEY[:-1]}", "it has 42 characters after k1., expected 43"),
        (f"k2{KEY[2:]}", "expected k1"),
        (f"{KEY}.AAECAwQFBgcICQoLDA0ODw.abcdef", "is a join line"),
        ("desk", "tcp:// goes with a host and a port"),
    ],
)
def test_an_address_that_ends_with_no_key_has_its_fault_named_and_shows_no_secret(part: str, fault: str) -> None:
    found = addresses.fault(f"tcp://desk:5600#{part}", addresses.broker_schemes())
    assert found is not None
    assert fault in found
    assert part[8:] not in found or part == "desk"


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
    ("url", "needed"),
    [
        ("tcp://*:5600", True),
        (f"tcp://desk:5600#{KEY}", True),
        ("tcp://[::1]:5600", False),
        ("ipc:///tmp/x", False),
        ("unix:///run/redis.sock", False),
        ("redis://127.0.0.1:6379/0#desk", False),
        ("redis://10.0.0.9:6379/0#desk", True),
        ("rediss://:secret@redis.example", True),
        ("redis://:6379/0", False),
        ("sqlite", False),
    ],
)
def test_a_broker_that_others_can_reach_needs_keys_unless_they_are_renounced(url: str, needed: bool) -> None:
    assert addresses.needs_keys(url) is needed
    assert not addresses.needs_keys(url, insecure=True)


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
