"""Machines of a run, each a workspace of its own: the broker's address as others dial it, and who is there."""

import json
import re
from dataclasses import replace

from stageline.broker.keys.join_line import JoinLine
from support.workspace import Command, Workspace, own_address, until

GATED = """
import os
from torch import nn

class Gate(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 9 and os.path.exists("gate"):
            open("gate").read()
        return x

def build():
    return nn.Sequential(nn.Linear(4, 8), Gate(), nn.Linear(8, 2))

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
"""A model whose ninth forward waits until there is something in the pipe `gate`."""


def line_in(said: str) -> JoinLine:
    """The join line in what a broker or a script has printed, from `here`."""
    printed = re.search("--join '(.*?)'", said)
    assert printed is not None, said
    return here(JoinLine.parse(printed[1]))


def here(line: JoinLine) -> JoinLine:
    """The line with an address of this machine that can be dialled for certain, in place of the machine's name."""
    if not line.address.startswith("tcp:"):
        return line
    return replace(line, address=f"tcp://{own_address()}:{line.address.rpartition(':')[2]}")


def broker_at(desk: Workspace, address: str, *sets: str) -> tuple[Command, JoinLine]:
    """A broker that other machines can reach, and the line that it prints."""
    broker = desk.start("broker", ".", "--bind", address, *sets)
    return broker, line_in(until(broker.stderr, "start every worker with"))


def present(desk: Workspace) -> list[str]:
    """The names of the workers that the broker knows to be there."""
    facts = json.loads(desk.command("status", "--json").stdout)
    return [row["name"] for row in facts["workers"] if row["standing"] == "present"]
