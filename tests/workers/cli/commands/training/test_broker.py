"""`stageline broker`: what it prints when it listens."""

import shlex
import signal

from support.workspace import free_port, until


def test_the_broker_prints_how_to_start_workers_of_the_same_plan(workspace):
    sets = ("run.steps=4", "queues.url=tcp://127.0.0.1:0", "optimizer.note=a b")
    options = [word for each in sets for word in ("--set", each)]
    broker = workspace.start("broker", ".", *options, "--bind", f"tcp://127.0.0.1:{free_port()}")
    told = shlex.split(until(broker.stderr, "start every worker with: ").partition("with: ")[2])
    assert told[:-2] == ["stageline", "worker", ".", *options]
    assert told[-2] == "--broker"
    for number in (signal.SIGINT, signal.SIGINT):
        broker.send_signal(number)
    broker.communicate()
