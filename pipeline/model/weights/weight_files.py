"""Which files a path of weights means, and which of them has which tensor.

model.safetensors, model.pt        that file
model.safetensors.index.json       the files that it names beside it, "shards"; some may be lacking
                                   what several stages have is taken from one that is there
a folder, as transformers has one  model.safetensors.index.json in it, or model.safetensors
"""

import json
from collections.abc import Mapping
from pathlib import Path

from stageline.pipeline.errors import ModelRefused

from .tensor_files import SAFETENSORS, TORCH, names_in

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COPIES = "stageline_copies"  # in the metadata of an index: entries by the files that have them too
_WANTED = (
    "expected a .safetensors file, a model.safetensors.index.json, a folder with one of them, or a .pt file of a "
    "state dict"
)


def files_by_name(path: Path) -> Mapping[str, Path]:
    """The file of each tensor, by the tensors' names. Raises `ModelRefused`."""
    file = _in_folder(path) if path.is_dir() else path
    if not file.exists():
        raise ModelRefused(f"there is no such file; {_WANTED}")
    if file.name.endswith(".index.json"):
        return _indexed(file)
    if file.suffix not in (*SAFETENSORS, *TORCH):
        raise ModelRefused(f"a {file.suffix or 'nameless'} file is not read; {_WANTED}")
    return dict.fromkeys(names_in(file), file)


def _in_folder(folder: Path) -> Path:
    for name in (INDEX, WHOLE):
        if (folder / name).exists():
            return folder / name
    raise ModelRefused(f"the folder holds neither {INDEX} nor {WHOLE}; save_pretrained() writes one of them")


def _indexed(index: Path) -> Mapping[str, Path]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        files = {str(name): str(shard) for name, shard in content["weight_map"].items()}
        copies = (content.get("metadata") or {}).get(COPIES, {})
        also = [(str(name), str(shard)) for shard, names in copies.items() for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelRefused(f"{index.name} is no index of safetensors files: {type(error).__name__}: {error}") from error
    for shard in (*files.values(), *(shard for _, shard in also)):
        if Path(shard).name != shard or Path(shard).suffix not in SAFETENSORS:
            raise ModelRefused(f"{index.name} names {shard!r}; expected .safetensors files beside it")
    found = {name: index.parent / shard for name, shard in files.items()}
    for name, shard in also:
        if name in found and not found[name].exists() and (index.parent / shard).exists():
            found[name] = index.parent / shard
    return found
