"""The store in a Redis server: its one owner, and a server that is away."""

from contextlib import closing

import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.control.store import StoreUnusable
from stageline.broker.transports.redis.store import RedisStore
from support.redis_server import shared_server


def record(stage: int, step: int) -> StepRecord:
    return StepRecord(stage, step, f"times of {stage}/{step}".encode())


def test_of_two_brokers_the_one_that_wrote_first_later_stops():
    url = shared_server().own_database()
    with closing(RedisStore(url, "run")) as one, closing(RedisStore(url, "run")) as other:
        one.put("run", {"id": "a"})
        assert other.load().facts == {"run": {"id": "a"}}
        one.put("run", {"id": "b"})  # reading does not take ownership
        other.put("run", {"id": "c"})
        with pytest.raises(StoreUnusable, match="another broker has taken over"):
            one.put("run", {"id": "d"})


def test_the_reason_is_reported_while_a_server_is_away():
    received: list[str] = []
    with pytest.raises(StoreUnusable, match="cannot be reached"):
        RedisStore("redis://127.0.0.1:1/0", "run", patience=0.1, waiting=received.append)
    assert "Connection refused" in received[0]


def test_records_that_another_client_replaces_are_named_and_waited_for_and_then_count_as_lost():
    server = shared_server()
    number = server.own_number()
    key = "stageline:{run}:store:fact"

    def waiting(reason: str) -> None:
        received.append(reason)
        if len(received) == 2:
            client.delete(key)

    received: list[str] = []
    with (
        closing(server.client(number)) as client,
        closing(RedisStore(server.url_of(number), "run", waiting=waiting)) as store,
    ):
        store.append([record(0, 4)], {4: 0.5})
        client.set(key, "mine")
        with pytest.raises(StoreUnusable, match=r"another client replaced records .*: they are lost. Start the broker"):
            store.put("run", {"id": "a"})
        assert set(received) == {
            f"key {key} is a string, not a hash: another client replaced it. Delete it, and the run goes on [SL316]"
        }
        assert client.keys("stageline:{run}:store:*") == []
