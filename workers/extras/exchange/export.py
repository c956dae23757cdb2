"""Writes weights in the forms that other programs read. What is written is there whole or not at all.

safetensors     one file
stages          stage-N.safetensors, and an index of them: each machine needs the index and its own stages' files
                (an entry of several stages is in each of their files)
transformers    config.json and model.safetensors, or shards and their index: what from_pretrained reads
dcp             what torch.distributed.checkpoint.load reads
"""

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from stageline.pipeline.model.tensor_files import COPIES, INDEX, WHOLE
from stageline.workers.disk.atomic_file import draft_of, make_folder, publish, sync, write_file

from .stored_weights import StoredWeights, WeightsUnusable

CONFIG = "config.json"
_FORMAT = {"format": "pt"}  # transformers asks for it


def export_file(weights: StoredWeights, target: Path) -> None:
    """Write one safetensors file with all entries. Raises `WeightsUnusable`, `OSError`."""
    require_absent(target)
    make_folder(target.parent)
    draft = draft_of(target)
    try:
        write_tensors(draft, weights.read(weights.places))
        publish(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def export_stages(weights: StoredWeights, target: Path) -> None:
    """Write a folder with a safetensors file for each stage. Raises `WeightsUnusable`, `OSError`."""
    named = {f"stage-{stage}.safetensors": weights.names_in(part) for stage, part in enumerate(weights.files)}
    export_folder(target, lambda draft: write_shards(draft, weights, named))


def export_transformers(weights: StoredWeights, target: Path, config: Mapping[str, object], most: int) -> None:
    """Write a folder for `from_pretrained`.

    Args:
        weights: Weights to write.
        target: Folder, which must not exist.
        config: Content of `config.json`.
        most: Bytes of a shard at most; a larger entry has a shard of its own.

    Raises:
        WeightsUnusable: The folder exists, or the weights cannot be read or written in this form.
        OSError: The folder cannot be written.
    """

    def write(draft: Path) -> None:
        shards = shards_of({name: weights.size(name) for name in weights.places}, most)
        if len(shards) == 1:
            write_tensors(draft / WHOLE, weights.read(weights.places))
        else:
            names = (f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1))
            write_shards(draft, weights, dict(zip(names, shards, strict=True)))
        write_file(draft / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")

    export_folder(target, write)


def read_configuration(path: Path) -> Mapping[str, object]:
    """Return the settings in a configuration file, or in the config.json of a folder. Raises `WeightsUnusable`."""
    file = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsUnusable(f"--config {file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise WeightsUnusable(f"--config {file} is no table of settings, as save_pretrained writes it")
    return found


def export_dcp(weights: StoredWeights, target: Path) -> None:
    """Write a folder for `torch.distributed.checkpoint.load`. Its metadata is a pickle, as torch writes it.

    Raises:
        WeightsUnusable: The folder exists, or the weights cannot be read.
        OSError: The folder cannot be written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # slow to import
    from torch.distributed.checkpoint.state_dict_saver import save

    def write(draft: Path) -> None:
        tensors, writer = weights.read(weights.places), FileSystemWriter(str(draft), sync_files=True)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that only this process saves
            save(tensors, storage_writer=writer, no_dist=True)

    export_folder(target, write)


def export_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a draft of the folder `target`, then rename the draft.

    Raises:
        WeightsUnusable: `target` exists already. Errors of `write` are raised, too.
    """
    require_absent(target)
    make_folder(target.parent)
    draft = draft_of(target)
    draft.mkdir()
    try:
        write(draft)
        sync(draft)
        publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # once published, it has another name


def write_shards(folder: Path, weights: StoredWeights, shards: Mapping[str, Sequence[str]]) -> None:
    """Write a file for each of `shards`, and their index. The entries of one file are in memory at a time.

    Args:
        folder: Folder of the files.
        weights: Weights to write.
        shards: Names of entries by name of the file.
    """
    for file, names in shards.items():
        write_tensors(folder / file, weights.read(names))
    sizes = {name: weights.size(name) for names in shards.values() for name in names}
    write_index(folder, shards, sum(sizes.values()))


def write_index(folder: Path, shards: Mapping[str, Collection[str]], size: int) -> None:
    """Write an index that tells which file has which entry, and the bytes of all entries.

    The format names one file for each entry; other files that have the entry, too, are noted beside.

    Args:
        folder: Folder of the files.
        shards: Names of entries by name of the file.
        size: Bytes of all entries.
    """
    places: dict[str, str] = {}
    copies: dict[str, list[str]] = {}
    for file, names in shards.items():
        if again := sorted(name for name in names if places.setdefault(name, file) != file):
            copies[file] = again
    metadata: dict[str, object] = {"total_size": size}
    if copies:
        metadata[COPIES] = copies
    index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    write_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")


def shards_of(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the entries in their order, in groups of at most `most` bytes, or of one entry. `sizes` are bytes."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write row-major tensors, none in the memory of another, to `file`. On return they are on the disk.

    Raises:
        WeightsUnusable: The form cannot hold the tensors.
        OSError: The file cannot be written.
    """
    try:
        save_file(dict(tensors), file, _FORMAT)
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise WeightsUnusable(f"{file.name} cannot hold these weights: {error}") from error
    file.chmod(file.parent.stat().st_mode & 0o666)  # save_file keeps it from all other users
    sync(file)


def require_absent(target: Path) -> None:
    """Raise `WeightsUnusable` if there is something at `target` already."""
    if target.exists() or target.is_symlink():
        raise WeightsUnusable(f"{target} is there already, and is not overwritten: name another place, or remove it")
