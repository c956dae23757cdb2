"""A user's script that trains with `fit`, as the tests run it: arguments name what happens on the way.

fit.py processes                      3 stages, evaluated every 4 steps, until 3 evaluations in a row were not better
fit.py processes kill worker-2 9      that process is killed once the loss of step 9 is there; "script": this one.
                                      Several may be named
fit.py processes resume               goes on with the newest run in ./runs
fit.py processes raise 6              a callback raises then
fit.py processes interrupt 6          Ctrl-C comes then
fit.py processes kill-all 10          all processes of the run are killed then, and this one
QUEUES=redis://... fit.py processes   over those queues
PLATEAU=1 fit.py processes            the learning rate follows the evaluations
fit.py inline
fit.py tcp://127.0.0.1:7000           with workers that join there
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from glob import glob
from hashlib import sha256

import overfitted
import psutil
import torch
from pids import processes
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stageline import Callback, Line
from stageline.workers.script.calls.calls import StepLoss

WORKERS, *HAPPENS = sys.argv[1:]


class Happening(Callback):
    """Calls of the script's callback, and their effects."""

    def __init__(self) -> None:
        self.losses: dict[int, float | None] = {}
        self.told: list[object] = []

    def on_step(self, step: int, loss: StepLoss) -> None:
        self.losses[step] = loss.item()
        match HAPPENS:
            case ["kill", *places] if str(step) in places:
                name = places[places.index(str(step)) - 1]
                os.kill(os.getpid() if name == "script" else processes("runs")[name], signal.SIGKILL)
            case ["kill-all", at] if step == int(at):
                for pid in (*psutil.Process().children(), *map(psutil.Process, processes("runs").values())):
                    with suppress(psutil.NoSuchProcess):
                        pid.kill()
                os.kill(os.getpid(), signal.SIGKILL)
            case ["raise", at] if step == int(at):
                raise ValueError("a mistake in a callback")
            case ["interrupt", at] if step == int(at):
                os.kill(os.getpid(), signal.SIGINT)

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        self.told.append(["evaluation", step, max(self.losses, default=None)])

    def on_best(self, step: int, value: float) -> None:
        self.told.append(["best", step, value])


def digest(weights: Mapping[str, Tensor]) -> str:
    return sha256(b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights))).hexdigest()


def main() -> None:
    happening, joins = Happening(), "://" in WORKERS
    begin = partial(Line.resume, max(glob("runs/*"))) if HAPPENS == ["resume"] else Line
    begin = partial(Line.resume, "best") if HAPPENS == ["best"] else begin
    with begin(
        overfitted.build if joins else overfitted.build(),
        cut=[2, 4],
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=0.03),
        microbatches=3,
        lr_scheduler=partial(ReduceLROnPlateau, factor=0.5, patience=0) if "PLATEAU" in os.environ else None,
        lr_every="evaluation",
        metrics=[overfitted.accuracy],
        workers="processes" if joins else WORKERS,
        broker=WORKERS if joins else None,
        settings={
            "recovery.snapshot_every": int(os.environ.get("SNAPSHOT_EVERY", "5")),
            "recovery.lease": "3s",
            **({"queues.url": os.environ["QUEUES"]} if "QUEUES" in os.environ else {}),
        },
    ) as line:
        first = line.position
        if HAPPENS == ["best"]:
            print(json.dumps({"first": first, "weights": digest(line.state_dict())}))
            return
        fitted = line.fit(
            overfitted.batches(),
            epochs=50,
            held_out=overfitted.held_out(),
            evaluate_every=4,
            patience=3,
            best="best" if WORKERS != "inline" else None,
            callbacks=[happening],
        )
    assert fitted.best is not None
    found = {
        "first": first,
        "steps": fitted.steps,
        "reason": fitted.reason,
        "loss": fitted.loss,
        "evaluations": fitted.evaluations,
        "best": [fitted.best.step, fitted.best.value],
        "losses": happening.losses,
        "told": happening.told,
        "weights": digest(line.state_dict()),
    }
    print(json.dumps(found))


main()
