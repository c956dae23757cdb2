"""Writes the two parts of a trained model, one for each machine: `python split.py FOLDER`, where it was saved.

Without FOLDER it takes a model that was never trained.
"""

import sys
from pathlib import Path

from model import CUT, build
from safetensors.torch import save_file

model = build() if len(sys.argv) < 2 else type(build()).from_pretrained(sys.argv[1])
first = int(CUT[0].rpartition(".")[2])  # number of the second part's first layer


def is_second(name: str) -> bool:
    layer = name.removeprefix("layoutlm.encoder.layer.").partition(".")[0]
    return name.startswith(("classifier", "layoutlm.pooler")) or (layer.isdigit() and int(layer) >= first)


for number in (0, 1):
    part = {name: tensor for name, tensor in model.state_dict().items() if is_second(name) == bool(number)}
    save_file(part, f"part-{number}.safetensors")
    print(f"part-{number}.safetensors: {len(part)} tensors, {Path(f'part-{number}.safetensors').stat().st_size} bytes")
