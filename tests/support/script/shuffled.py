"""A user's script that trains in epochs of 5 shuffled batches, is resumed, and says what became of that.

shuffled.py torch 7 save      a DataLoader with shuffle=True and no generator; saved after 7 steps,
                              and resumed from there
shuffled.py torch 7 raise     an exception ends the run after 7 steps, and the run itself is resumed
shuffled.py torch 5 save      between two epochs
shuffled.py generator 7 save  a DataLoader whose generator has a seed
shuffled.py Loader 7 save     stageline's own; "reseeded": its second seed is another
shuffled.py torch 7 unchecked without the comparison
"""

import json
import sys
from functools import partial
from typing import Any

import net
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stageline import DataError, Line, Loader

KIND, STEPS, HAPPENS = sys.argv[1:]
STEPS_TO = int(STEPS)


def loader(seed: int) -> Any:
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x[:, :3].argmax(1))
    match KIND:
        case "torch":
            torch.seed()  # net.build() has set it
            return DataLoader(rows, batch_size=6, shuffle=True)
        case "generator":
            return DataLoader(rows, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
    return Loader(rows, batch_size=6, seed=seed if KIND == "reseeded" else 0)


def main() -> None:
    arguments: dict[str, Any] = {
        "cut": [2],
        "loss": nn.functional.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "microbatches": 3,
        "settings": {"data.check": HAPPENS != "unchecked"},
    }
    try:
        with Line(net.build(), **arguments) as line:
            line.fit(loader(0), steps=STEPS_TO)
            folder = line.folder
            assert folder is not None
            if HAPPENS == "raise":
                raise InterruptedError
            line.save("saved")
    except InterruptedError:
        pass
    with Line.resume(folder if HAPPENS == "raise" else "saved", net.build(), **arguments) as line:
        assert line.position == STEPS_TO
        said = ""
        try:
            line.fit(loader(1), steps=12)
        except DataError as error:
            said = str(error)
        print(json.dumps({"steps": line.position, "said": said}))


main()
