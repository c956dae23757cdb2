"""A user's script, as the tests run it: arguments name what happens to the run on the way.

train.py inline                      all in this process
train.py processes kill worker-1 7   that process is killed once step 7 has been called
train.py processes resume            goes on with the newest run in ./runs
train.py processes save 13           saves a checkpoint in ./saved before that step, and kills a worker
CUT=[1,4] train.py processes resume  the same with other stages
train.py tcp://127.0.0.1:7000 gate 7 with workers that join there; before step 7 it waits for the file ./gate
"""

import json
import os
import signal
import sys
from functools import partial
from glob import glob
from hashlib import sha256
from time import sleep

import net
import psutil
import torch
from pids import processes
from torch import Tensor, nn

from stageline import Line, NotSaved

WORKERS, *HAPPENS = sys.argv[1:]
STEPS, MICROBATCHES = 24, 3


def build() -> nn.Sequential:
    """Function that no other process could import: it is in the script itself."""
    return net.build()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(9, 6, generator=generator)
    return x, (x[:, :3]).argmax(1)


def happen(line: Line, step: int) -> None:
    match HAPPENS:
        case ["kill", name, at] if step == int(at):
            os.kill(os.getpid() if name == "script" else processes("runs")[name], signal.SIGKILL)
        case ["kill-launcher", at] if step == int(at):
            (launcher,) = psutil.Process().children()
            launcher.kill()
            while processes("runs"):  # they end because it is gone
                sleep(0.01)
        case ["gate", at] if step == int(at):
            print(f"at step {step}", flush=True)
            with open("gate") as gate:
                gate.read()
        case ["raise", at] if step == int(at):
            print(line, flush=True)
            raise ValueError("a mistake in the loop")
        case ["interrupt", at] if step == int(at):
            os.kill(os.getpid(), signal.SIGINT)
        case ["mismatch", at] if step == int(at):
            x, y = batch(step)
            try:
                line.step(x, y[:-1])
            except ValueError as error:
                print(f"refused: {error}", file=sys.stderr)
        case ["evaluate", every] if step % int(every) == 0:
            x, y = batch(step + 1000)
            line.evaluate([(x, y), (x[:2], y[:2])])
            line.evaluate([(x, y)], ema=True)
            line.predict(x)
        case ["save", at] if step == int(at):
            x, y = batch(step + 1000)
            line.evaluate([(x, y)])  # calls and evaluations are ahead of what they will be in a run that begins there
            line.save("saved")
            try:
                line.save("saved")
            except NotSaved as error:
                print(error, file=sys.stderr)
            os.kill(processes("runs")["worker-1"], signal.SIGKILL)  # another repeats the call
        case ["validate", at] if step == int(at):
            x, y = torch.randn(5000, 6), torch.randint(3, (5000,))
            found = line.evaluate([(x, y)] * 60)
            os.kill(processes("runs")["worker-1"], signal.SIGKILL)
            assert line.evaluate([(x, y)] * 60) == found


def digest(state: dict[str, Tensor]) -> str:
    return sha256(b"".join(state[name].contiguous().numpy().tobytes() for name in sorted(state))).hexdigest()


def main() -> None:
    losses = []
    match HAPPENS:
        case ["resume"] | ["resume-other"]:
            resumed = max(glob("runs/*"))
        case ["resume", folder]:
            resumed = folder
        case _:
            resumed = None
    joins = "://" in WORKERS
    begin = Line if resumed is None else partial(Line.resume, resumed)
    with begin(
        net.build if joins else build(),
        cut=json.loads(os.environ.get("CUT", "[3]")),
        loss=nn.functional.cross_entropy,
        optimizer=(lambda parameters: 3) if HAPPENS == ["optimizer"] else partial(torch.optim.AdamW, lr=0.01),  # type: ignore[arg-type]
        lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.9),
        ema_decay=0.9,
        microbatches=MICROBATCHES,
        workers="processes" if joins else WORKERS,
        broker=WORKERS if joins else None,
        settings={
            "recovery.snapshot_every": 5,
            "recovery.lease": "3s",
            "queues.retain_bytes": "1MiB",
            "broker.patience": os.environ.get("PATIENCE", "600s"),
        },
    ) as line:
        first = line.position
        for step in range(first, STEPS):
            happen(line, step)
            losses.append(line.step(*batch(step + (HAPPENS == ["resume-other"]))))
    digests = {"weights": digest(line.state_dict()), "averages": digest(line.state_dict(ema=True))}
    print(json.dumps({"first": first, "losses": [loss.item() for loss in losses], **digests}))


main()
