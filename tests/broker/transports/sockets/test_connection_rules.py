"""Which connections are closed, and why: decided without a socket or a clock."""

import pytest

from stageline.broker.transports.sockets.connection_rules import (
    MESSAGE_SECONDS,
    SLACK,
    UNTRUSTED_BYTES,
    UNTRUSTED_FRAMES,
    UNTRUSTED_SECONDS,
    PeerConnection,
    refusals,
)

LARGEST = 1000  # bytes of a message
HANDSHAKE = 107  # bytes


def connection(port: int = 1, opened: float = 0.0, *, host: str = "10.0.0.1", trusted: bool = False) -> PeerConnection:
    return PeerConnection(f"{host}:{port}", opened, trusted=trusted)


def reasons(*connections: PeerConnection, now: float = 1.0, drained: float = 1e9, descriptors: int = 400) -> list[str]:
    found = refusals(connections, now, drained, largest=LARGEST, descriptors=descriptors)
    return [f"{each.peer.rpartition(':')[2]}: {reason}" for each, reason in found]


def trusted_after(received: int, delivered: int) -> PeerConnection:
    """One that has brought a message, its handshake and nothing else."""
    peer = connection(trusted=True)
    peer.note(received, delivered, 1, 0.0)
    return peer


def test_a_quiet_connection_is_left_alone_for_a_while():
    peer = connection()
    peer.note(UNTRUSTED_BYTES, 0, UNTRUSTED_FRAMES, 0.5)
    assert reasons(peer, now=UNTRUSTED_SECONDS - 0.1) == []


def test_a_connection_that_brings_too_much_before_it_is_trusted_is_closed():
    peer = connection()
    peer.note(UNTRUSTED_BYTES + 1, UNTRUSTED_BYTES, 1, 0.5)
    assert reasons(peer) == ["1: 65537 bytes came, 65536 may come before a genuine message"]


def test_a_connection_that_brings_many_messages_of_which_none_is_genuine_is_closed():
    peer = connection()
    peer.note(None, 0, UNTRUSTED_FRAMES + 1, 0.5)
    assert reasons(peer) == ["1: 129 messages came, 128 may come before a genuine one"]


def test_a_connection_that_does_not_become_trusted_in_time_is_closed():
    assert reasons(connection(), now=UNTRUSTED_SECONDS) == ["1: no genuine message came in 5 s"]


def test_no_connection_is_too_slow_for_a_process_that_has_not_looked():
    peer = connection(opened=10.0)
    assert reasons(peer, now=60.0, drained=14.9) == []
    assert reasons(peer, now=60.0, drained=15.0) != []


def test_a_trusted_connection_may_send_as_long_and_as_much_as_it_likes_in_messages_that_are_taken():
    peer = connection(trusted=True)
    for n in range(1, 1000):
        peer.note(HANDSHAKE + 10**6 * n, 10**6 * n, n, float(n))
        assert reasons(peer, now=float(n)) == []


def test_a_trusted_connection_may_have_the_largest_message_and_some_slack_under_way():
    peer = trusted_after(HANDSHAKE + 50, 50)
    peer.note(50 + LARGEST + SLACK, 50, 1, 1.0)
    assert reasons(peer) == []
    peer.note(50 + LARGEST + SLACK + 1, 50, 1, 1.1)
    assert reasons(peer) == ["1: 16778217 bytes are under way, 16778216 may be"]


def test_all_connections_together_may_have_four_of_the_largest_messages_under_way():
    peers = [connection(n, trusted=True) for n in range(3)]
    for peer, received in zip(peers, (SLACK + 300, SLACK // 2, 4000), strict=True):
        peer.note(received, 0, 0, 0.5)
    assert reasons(*peers) == [
        f"0: {SLACK + SLACK // 2 + 4300} bytes are under way on all connections, 16781216 may be"
    ]


def test_a_message_of_a_trusted_connection_must_be_whole_in_time():
    peer = trusted_after(HANDSHAKE + 50, 50)
    peer.note(HANDSHAKE + 60, 50, 1, 10.0)
    assert reasons(peer, now=9.9 + MESSAGE_SECONDS) == []
    assert reasons(peer, now=10.0 + MESSAGE_SECONDS) == ["1: a message was not whole 300 s after its first bytes came"]
    peer.note(HANDSHAKE + 80, 80, 2, 11.0 + MESSAGE_SECONDS)
    assert reasons(peer, now=11.0 + MESSAGE_SECONDS) == []


def test_between_messages_a_trusted_connection_may_be_silent_for_ever():
    peer = trusted_after(HANDSHAKE + 50, 50)
    peer.note(HANDSHAKE + 50, 50, 1, 1.0)
    assert reasons(peer, now=1e6) == []


def test_where_the_system_does_not_count_bytes_time_and_number_still_do():
    peer = connection()
    peer.note(None, 500, 3, 1.0)
    assert peer.pending == 0
    assert reasons(peer, now=UNTRUSTED_SECONDS) == ["1: no genuine message came in 5 s"]


def test_messages_that_came_over_a_former_connection_lend_no_bytes_to_this_one():
    peer = connection(trusted=True)
    peer.note(200, 10**9, 5, 1.0)
    assert peer.pending == 0


def test_of_too_many_untrusted_connections_the_oldest_are_closed():
    peers = [connection(n, opened=n / 1000) for n in range(102)]
    found = reasons(*peers)  # a quarter of 400 descriptors may be
    assert [reason.partition(":")[0] for reason in found] == ["0", "1"]
    assert found[0] == "0: 102 connections have brought no genuine message, 100 may at a time"


def test_a_host_with_many_connections_does_not_crowd_out_another():
    lonely = connection(7, opened=0.0, host="10.0.0.2")
    crowd = [connection(1000 + n, opened=0.1 + n / 1000) for n in range(300)]
    closed = reasons(lonely, *crowd)
    assert len(closed) == 201
    assert not any(reason.startswith("7:") for reason in closed)


def test_trusted_connections_are_not_closed_for_the_number_of_others():
    peers = [connection(n, trusted=True) for n in range(199)] + [connection(1000 + n, n / 10) for n in range(3)]
    closed = reasons(*peers)  # half of 400 descriptors may be
    assert [reason.partition(":")[0] for reason in closed] == ["1000", "1001"]


def test_too_many_trusted_connections_are_too_many():
    peers = [connection(n, opened=n / 1000, trusted=True) for n in range(201)]
    assert reasons(*peers) == ["0: there are 201 connections, 200 may be"]


@pytest.mark.parametrize("descriptors", [4, 16])
def test_a_process_with_hardly_any_descriptors_closes_and_does_not_fail(descriptors: int):
    peers = [connection(n, opened=n / 1000, trusted=n % 2 == 0) for n in range(40)]
    left = 40 - len(reasons(*peers, descriptors=descriptors))
    assert left <= descriptors // 2
