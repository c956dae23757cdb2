"""Transports are found by the scheme of an address; the registry says what the rest of the program asks about each."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stageline.broker.errors import AddressUnusable
from stageline.broker.transports.base import backend_of, open_client
from stageline.pipeline.addresses import transports
from support.workspace import free_port

PIGEON = """
from stageline.broker.transports.base import Backend
from stageline.pipeline.addresses import Reach, register

class Pigeon(Backend):
    schemes = {"pigeon": "pigeon://loft"}
    reach = Reach.MACHINE
    carries_control = True

register(Pigeon())
"""


def test_facts_about_transports_are_known_without_what_opens_them() -> None:
    script = (
        "import sys; from stageline.pipeline.addresses import transports; print(*transports()); print(*sys.modules)"
    )
    schemes, modules = _printed(script).splitlines()
    assert {"memory", "shm", "ipc", "tcp", "redis", "rediss", "unix"} <= set(schemes.split())
    assert not {"redis", "hiredis", "zmq", "torch"} & set(modules.split())


def test_a_transport_is_one_file(tmp_path: Path) -> None:
    """The plan accepts its addresses, and the broker's rules know its reach, though nothing else names it."""
    (tmp_path / "pigeon.py").write_text(PIGEON)
    script = (
        "import sys, stageline.broker.transports as room\n"
        "room.__path__.append(sys.argv[1])\n"
        "from stageline.pipeline.plan.keys.deployment import BrokerPlan, QueuesPlan\n"
        "print(QueuesPlan(url='pigeon://roof').in_one_process, BrokerPlan(url='pigeon://roof').url)"
    )
    assert _printed(script, str(tmp_path)) == "False pigeon://roof\n"


def test_every_transport_gives_an_example_that_is_valid() -> None:
    for scheme, transport in transports().items():
        assert transport.fault(transport.schemes[scheme]) is None


def test_an_unknown_scheme_opens_nothing() -> None:
    with pytest.raises(AddressUnusable, match="carrier://h is not an address of a broker"):
        open_client("carrier://h")


@pytest.mark.parametrize("url", ["tcp://nowhere", "redis://127.0.0.1:6379/0?nonsense=1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(AddressUnusable, match=r"cannot use tcp://nowhere|cannot reach the broker"):
        open_client(url)


def test_a_process_that_listens_is_told_from_none(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert _listens(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        assert _listens(f"tcp://*:{server.getsockname()[1]}")
    assert not _listens(f"tcp://127.0.0.1:{free_port()}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        assert not _listens(f"ipc://{tmp_path}/s")  # as a killed broker leaves it
        server.listen()
        assert _listens(f"ipc://{tmp_path}/s")
    assert not _listens(f"ipc://{tmp_path}/none")
    assert _listens("redis://10.0.0.9:6379/0")  # only an answer can tell


def _listens(url: str) -> bool:
    return backend_of(url).listens(url)


def _printed(script: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout
