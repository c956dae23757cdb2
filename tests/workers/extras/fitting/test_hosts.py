"""The file of machines is read strictly, and all that is wrong with it is told at once."""

from pathlib import Path

import pytest

from stageline.pipeline.plan import PlanRefused
from stageline.workers.extras.fitting import read_hosts

RIGHT = """
[hosts.desk]
memory = "2GB"

[hosts.cloud]
speed = 4.0
memory = "8GiB"
data = false

[[links]]
between = ["desk", "cloud"]
latency = "20ms"
bandwidth = "50Mbit/s"
"""


def refused(folder: Path, text: str) -> list[str]:
    (folder / "hosts.toml").write_text(text)
    with pytest.raises(PlanRefused) as error:
        read_hosts(folder / "hosts.toml")
    return [str(each).replace(f"{folder}/", "") for each in error.value.errors]


def test_a_file_of_machines(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(RIGHT)
    found = read_hosts(tmp_path / "hosts.toml")
    link = found.link("cloud", "desk")
    assert link is not None
    assert (link.latency, link.bandwidth) == (0.02, 6.25e6)
    assert (found.hosts["desk"].memory, found.hosts["cloud"].data) == (2 * 10**9, False)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    text = RIGHT.replace('memory = "2GB"', "sped = 2").replace("4.0", '"fast"').replace("Mbit/s", "Mbps")
    assert refused(tmp_path, text) == [
        'hosts.toml:2: hosts.desk.memory: missing; expected a size in bytes of at least 1, such as 1048576 or "512MiB"',
        'hosts.toml:3: hosts.desk.sped: there is no such key; did you mean "speed"?',
        'hosts.toml:6: hosts.cloud.speed = "fast": expected a number above 0, such as 1.0, got text',
        'hosts.toml:10: links.0.bandwidth = "50Mbps": expected a bandwidth in bytes a second, such as 1e6 or '
        '"50Mbit/s"; units are kbit/s, Mbit/s, Gbit/s, kB/s, MB/s, GB/s',
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "hosts.toml: hosts: missing; write a table for each machine, such as [hosts.desk]"),
        ("[hosts]", "hosts.toml:1: hosts: there is none; write a table for each machine, such as [hosts.desk]"),
        ("hosts = 3", "hosts.toml:1: hosts = 3: this is a table: write [hosts.NAME], and its keys below"),
        (RIGHT + "[more]", "hosts.toml:14: more: there is no such key; there are hosts, links"),
        (
            RIGHT.replace('["desk", "cloud"]', '["desk", "clout"]'),
            'hosts.toml:10: links.0.between: there is no host "clout"; did you mean "cloud"?',
        ),
        (
            RIGHT.replace('["desk", "cloud"]', '["desk", "desk"]'),
            'hosts.toml:10: links.0.between: "desk" has no link to itself: within a machine messages take no time',
        ),
        (
            RIGHT.replace("[hosts.desk]", "[hosts.desk]\ndata = false"),
            "hosts.toml: hosts: none has data, which the first stage and the last read; leave data = false out of one",
        ),
        ("[hosts", "hosts.toml: this is not TOML: Expected ']' at the end of a table declaration (at end of document)"),
    ],
)
def test_a_wrong_file_is_refused_with_the_way_out(tmp_path: Path, text: str, reason: str) -> None:
    assert refused(tmp_path, text) == [reason]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match=r"no\.toml: it cannot be read: No such file or directory"):
        read_hosts(tmp_path / "no.toml")
