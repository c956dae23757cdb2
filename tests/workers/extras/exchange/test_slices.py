"""Tensors that processes of another program have written in slices are whole again, or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stageline.workers.extras.exchange.foreign import foreign_weights
from stageline.workers.extras.exchange.stored_weights import StoredWeights, WeightsUnusable


def test_shards_that_have_slices_are_put_together_and_a_missing_one_is_found(tmp_path: Path) -> None:
    """As each process of a distributed run writes them."""
    whole = torch.arange(9.0).reshape(3, 3)
    for number, (low, high) in enumerate(((0, 2), (2, 3)), 1):
        info = {"a.weight": {"saved_offsets": [low, 0]}}
        file = tmp_path / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        save_file({"a.weight": whole[low:high].contiguous()}, file, {"DCP_SHARDING_INFO": json.dumps(info)})
    assert torch.equal(foreign_weights(tmp_path).read(["a.weight"])["a.weight"], whole)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(WeightsUnusable, match=r"have not all of a\.weight: a shard is missing"):
        _ = foreign_weights(tmp_path).forms


def put_slices(folder: Path, *slices: tuple[str, Tensor]) -> StoredWeights:
    """Of a tensor: the text of where each begins, and its numbers; each in a file."""
    for number, (begin, part) in enumerate(slices):
        info = {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": ' + begin + "}}"}
        save_file({"a": part}, folder / f"shard-{number}.safetensors", info)
    return foreign_weights(folder)


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        (
            [("[0]", torch.ones(2)), ("[1]", torch.ones(2)), ("[4]", torch.ones(1))],
            r"a has two slices for one place: that at \[0\] in .*0.safetensors and that at \[1\] in .*1.safetensors",
        ),
        ([("[0]", torch.ones(2)), ("[0]", torch.zeros(2))], r"a has other numbers at \[0\] in .*1.safetensors than in"),
        ([("[0]", torch.ones(2)), ("[0]", torch.ones(3))], "a has two slices for one place"),
        ([("[0]", torch.ones(2)), ("[2]", torch.ones(2).half())], "float16 of shape .2. in .* no slices of one tensor"),
        ([("[0]", torch.ones(2)), ("[2, 0]", torch.ones(2, 1))], "no slices of one tensor"),
        ([("[3]", torch.ones(2))], "have not all of a: a shard is missing"),
        ([("[Infinity]", torch.ones(2))], "does not tell which slices it has"),
        ([("[-1]", torch.ones(2))], "does not tell which slices it has"),
        ([("[0.5]", torch.ones(2))], "does not tell which slices it has"),
        ([("[0, 0]", torch.ones(2))], r"has a slice of a that begins at \[0, 0\], of shape \[2\]"),
    ],
)
def test_slices_that_do_not_tile_a_tensor_are_refused(
    slices: list[tuple[str, Tensor]], reason: str, tmp_path: Path
) -> None:
    """Only their sizes were added up: what no slice had was whatever lay in memory."""
    with pytest.raises(WeightsUnusable, match=reason):
        put_slices(tmp_path, *slices).read(["a"])


def test_slices_tile_a_tensor_in_two_dimensions_and_equal_ones_may_be_there_twice(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    parts = {"[0, 0]": whole[:2, :3], "[0, 3]": whole[:, 3:], "[2, 0]": whole[2:, :3], "[3, 0]": whole[3:]}
    slices = [(begin, part.contiguous()) for begin, part in parts.items()]
    assert torch.equal(put_slices(tmp_path, *slices, slices[1]).read(["a"])["a"], whole)
