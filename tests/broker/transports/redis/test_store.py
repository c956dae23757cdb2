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


SECRET, OTHER = bytes(range(32)), bytes(32)


def test_sealed_records_show_no_content_and_another_broker_with_the_key_goes_on():
    server = shared_server()
    number = server.own_number()
    with closing(RedisStore(server.url_of(number), "run", secret=SECRET)) as store:
        store.append([record(0, 4), record(1, 4)], {4: 0.53125, 5: None})
        store.put("registry", {"host": "desk-of-anna"})
        kept = store.load()
    with closing(server.client(number)) as client:
        everything = b"".join(client.dump(key) for key in client.keys("*"))
        shown = [*client.hvals("stageline:{run}:store:loss"), *client.hvals("stageline:{run}:store:fact")]
    for word in (b"desk-of-anna", b"times of", b"0.53125"):
        assert word not in everything
        assert not any(word in value for value in shown)
    with closing(RedisStore(server.url_of(number), "run", secret=SECRET)) as store:
        assert store.load() == kept
        assert kept.losses == {4: 0.53125, 5: None}
        assert store.record(1, 4) == record(1, 4)


@pytest.mark.parametrize(
    ("written", "read", "said"),
    [
        (SECRET, OTHER, "sealed with another key .* STAGELINE_KEY_FILE"),
        (SECRET, b"", "are sealed, and this process opens them without a key"),
        (b"", SECRET, "written without a key.*broker.insecure = true.*unlink"),
    ],
    ids=["another", "without", "needless"],
)
def test_records_of_another_key_or_without_are_refused_with_the_way_out(written: bytes, read: bytes, said: str):
    url = shared_server().own_database()
    with closing(RedisStore(url, "run", secret=written)) as store:
        store.put("run", {"id": "a"})
    with pytest.raises(StoreUnusable, match=said):
        RedisStore(url, "run", secret=read)
    with closing(RedisStore(url, "another", secret=read)) as store:
        assert store.load().facts == {}


@pytest.mark.parametrize("change", ["altered", "moved", "of another run"])
def test_a_sealed_record_that_another_client_changed_is_not_used(change: str):
    server = shared_server()
    number = server.own_number()
    key = "stageline:{run}:store:fact"
    with (
        closing(RedisStore(server.url_of(number), "run", secret=SECRET)) as store,
        closing(RedisStore(server.url_of(number), "second", secret=SECRET)) as second,
        closing(server.client(number)) as client,
    ):
        for each in (store, second):
            each.put("run", {"id": "a"})
        value = client.hget(key, "run")
        if change == "altered":
            client.hset(key, "run", value[:-1] + bytes([value[-1] ^ 1]))
        elif change == "moved":
            client.hset(key, "registry", value)
        else:
            client.hset(key, "run", client.hget("stageline:{second}:store:fact", "run"))
        with pytest.raises(StoreUnusable, match=r"cannot be opened: another client changed it.*\{run\}:store"):
            store.load()
