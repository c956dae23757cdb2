"""Two machines with clocks that differ by three seconds: two network namespaces, in one of which time is ahead."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stageline.workers.cli.app import run
from support.relayed import Site
from support.traces import read_trace
from support.whole_run import plan_in

AHEAD, STEPS = 3.0, 12
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
HOOK = f"""
import os, select, time

def sleep(seconds):  # under libfaketime, time.sleep fails
    select.select([], [], [], seconds)

if "SHIFTED" in os.environ:
    from stageline.pipeline.process.steady_clock import STEADY

    time.time = lambda real=time.time: real() + {AHEAD}
    STEADY.__init__(time.time)  # as if this process had begun with that clock
"""
_BROKER = re.compile(r"broker at (tcp://[^\s,]+)")


def clock_ahead() -> dict[str, str]:
    """The environment of a process whose clock is ahead: by Debian's libfaketime, or by a hook in the model's file."""
    if not FAKETIME:
        return {"SHIFTED": "1"}
    return {"LD_PRELOAD": str(FAKETIME[0]), "FAKETIME": f"+{AHEAD:g}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them, at 10.78.0.1 and 10.78.0.2."""
    if os.geteuid():
        pytest.skip("networks can only be made by root")
    names = f"stageline-{os.getpid()}-north", f"stageline-{os.getpid()}-south"
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", names[0], "link", "add", "out", "type", "veth", "peer", "name", "out", "netns", names[1])
        for host, name in enumerate(names, start=1):
            _ip("-n", name, "address", "add", f"10.78.0.{host}/24", "dev", "out")
            _ip("-n", name, "link", "set", "out", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def trained(sites: Sequence[Site], plan: Path) -> Path:
    """The folder of a run whose broker and worker 0 are at one site, and worker 1 at the other, its clock ahead."""
    settings = {
        "STAGELINE_QUEUES__URL": "tcp://0.0.0.0:0",
        "STAGELINE_BROKER__INSECURE": "true",
        "STAGELINE_RUN__STEPS": str(STEPS),
    }
    here, there = sites
    broker = here.start("broker.log", "broker", str(plan), "--bind", "tcp://10.78.0.1:0", "--run", "both", **settings)
    url = here.said("broker.log", _BROKER)
    words = "worker", str(plan), "--broker", url, "--index"
    workers = [
        here.start("worker.log", *words, "0", **settings),
        there.start("worker.log", *words, "1", **settings, **clock_ahead()),
    ]
    for worker, site in zip(workers, sites, strict=True):
        assert worker.wait(100) == 0, site.log("worker.log")
    broker.terminate()
    broker.wait(100)
    return here.folder / "runs" / "both"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_timetable_and_the_trace_of_two_machines_have_every_message_sent_before_it_is_taken(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    plan = plan_in(tmp_path)
    with (plan.parent / "model.py").open("a") as file:
        file.write(HOOK)
    with two_networks() as names:
        sites = [Site(tmp_path / name, plan, ("ip", "netns", "exec", name)) for name in names]
        try:
            folder = trained(sites, plan)
        finally:
            for site in sites:
                site.kill()
    assert run(["timetable", str(folder), "--steps", f"4..{STEPS - 1}", "--json"]) == 0
    facts = json.loads(capsysbinary.readouterr().out)
    (ahead,) = (each["ahead"] for each in facts["clocks"] if each["worker"] == 1)
    assert ahead == pytest.approx(-AHEAD, abs=1.0)
    for step in facts["steps"]:
        actions = step["actions"]
        lasts = max(each["end"] for each in actions) - min(each["start"] for each in actions)
        assert step["seconds"] == pytest.approx(lasts, abs=0.01)
        # Messages go both ways: three seconds that were left in would turn one of them round.
        assert all(sent["end"] <= taken["start"] for sent, taken in ways(step["actions"]))
    traced = tmp_path / "run.pftrace"
    assert run(["trace", "export", str(folder), "--steps", f"4..{STEPS - 1}", "-o", str(traced)]) == 0
    trace = read_trace([traced.read_bytes()])
    flows = {flow for each in trace.slices for flow in each.flows}
    assert len(flows) == (STEPS - 4) * 2
    for flow in flows:
        way = sorted((each for each in trace.slices if flow in (*each.flows, *each.ends)), key=lambda each: each.start)
        assert [each.name[0] for each in way] == ["F", "F", "B", "B"]
        assert all(sent.end <= taken.start for sent, taken in pairwise(way))


def ways(actions: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each action that sends a message between the two stages, with the one that takes it."""
    at = {(each["kind"], each["stage"], each["microbatch"]): each for each in actions}
    count = max(microbatch for _, _, microbatch in at) + 1
    forward = [(at["F", 0, each], at["F", 1, each]) for each in range(count)]
    return forward + [(at["B", 1, each], at["B", 0, each]) for each in range(count)]
