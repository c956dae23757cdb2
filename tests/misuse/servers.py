"""Redis servers that cannot be used."""

from collections.abc import Callable
from contextlib import closing

from misuse.case import Ended, Misuse
from misuse.commands import beside_a_website
from support.redis_server import RedisServer
from support.workspace import Workspace, free_port


def train(url: str) -> tuple[str, ...]:
    return ("train", ".", "--set", f"queues.url={url}")


def with_server(
    url: Callable[[str], str] = str, prepare: Callable[[RedisServer], None] = lambda server: None, **settings: str
) -> Callable[[Workspace], Ended]:
    """Trains over a server of its own, at `url` of its address."""

    def play(workspace: Workspace) -> Ended:
        with RedisServer(**settings) as server:
            prepare(server)
            return workspace.command(*train(url(server.url)))

    return play


def becomes_a_replica(server: RedisServer) -> None:
    with closing(server.client()) as client:
        client.replicaof("127.0.0.1", free_port())


def row(what: str, play: Callable[[Workspace], Ended], *said: str, slow: bool = False) -> Misuse:
    return Misuse(what, 1, said, play=play, slow=slow)


ROWS = (
    row("a wrong password", with_server(lambda url: url.replace("://", "://:wrong@")), "does not let this run in"),
    row("a database too many", with_server(lambda url: f"{url[:-1]}99999"), "DB index is out of range", slow=True),
    row(
        "a server that throws keys away",
        with_server(maxmemory_policy="allkeys-lru"),
        "has maxmemory-policy allkeys-lru: it would throw messages away",
        "CONFIG SET maxmemory-policy noeviction",
        slow=True,
    ),
    row(
        "a read-only replica",
        with_server(prepare=becomes_a_replica),
        "You can't write against a read only replica",
        slow=True,
    ),
    row("a server without memory", with_server(maxmemory="1kb"), "used memory > 'maxmemory'", slow=True),
    row("TLS to a server without", with_server(lambda url: url.replace("redis://", "rediss://")), "", slow=True),
    row("a web server", beside_a_website(*train("redis://127.0.0.1:PORT/0")), 'got "<" as reply', slow=True),
    row(
        "no server",
        lambda workspace: workspace.command(*train("redis://127.0.0.1:9/0")),
        "cannot be reached",
        slow=True,
    ),
)
