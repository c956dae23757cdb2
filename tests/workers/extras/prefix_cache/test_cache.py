"""Rows come back by sample with the bits that they were kept with, and what is wrong with a cache is named."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stageline.pipeline import retry
from stageline.pipeline.data import Numbering, Order
from stageline.pipeline.retry import ResourceFault
from stageline.pipeline.tree import Tree, describe, leaves
from stageline.workers.extras.prefix_cache.cache import PrefixCache, PrefixCacheFailed

COUNT, EPOCH = 10, 3  # samples, and steps that have them: 4, 4 and 2
PARTS = {"model.factory": "model.py:build", "run.seed": 0}


def _cache(folder: Path, parts: dict[str, object] = PARTS, count: int = COUNT, **waiting: Any) -> PrefixCache:
    return PrefixCache(folder, Numbering(Order(COUNT, 4, 1, shuffle=True).rows, 2), count, dict(parts), **waiting)


def _samples(step: int, microbatch: int) -> Tensor:
    return Numbering(Order(COUNT, 4, 1, shuffle=True).rows, 2).microbatch(step, microbatch)


def _tree(samples: Tensor) -> Tree:
    """Of several dtypes and layouts, and with other values for each sample."""
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(COUNT, 3, 2, generator=generator)
    return {
        "x": table[samples].transpose(1, 2),
        "more": (
            table[samples] > 0,
            table[samples, 0, 0].to(torch.bfloat16),
            torch.view_as_complex(table)[samples],
            2,
            None,
            torch.zeros(len(samples), 0),
        ),
    }


def _kept(folder: Path, steps: int = EPOCH) -> PrefixCache:
    cache = _cache(folder)
    for step in range(steps):
        for microbatch in range(2):
            cache.keep(step, microbatch, _tree(_samples(step, microbatch)))
    return cache


def _same(one: Tree, other: Tree) -> bool:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    return describe(one) == describe(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for (_, a), (_, b) in pairs
    )


def test_rows_come_back_by_sample_in_every_later_step(tmp_path: Path) -> None:
    cache = _kept(tmp_path / "cache")
    for step in range(EPOCH, 3 * EPOCH):
        for microbatch in range(2):
            assert _same(cache.rows(step, microbatch), _tree(_samples(step, microbatch)))


def test_a_row_that_is_given_is_no_part_of_the_cache(tmp_path: Path) -> None:
    cache = _kept(tmp_path / "cache")
    given = cache.rows(3, 0)
    assert isinstance(given, dict)
    assert isinstance(given["x"], Tensor)
    given["x"].zero_()
    assert _same(cache.rows(3, 0), _tree(_samples(3, 0)))


def test_another_process_goes_on_with_what_is_there(tmp_path: Path) -> None:
    _kept(tmp_path / "cache").sync()
    later = _cache(tmp_path / "cache")
    assert later.open(EPOCH) == ""
    assert _same(later.rows(4, 1), _tree(_samples(4, 1)))


def test_only_the_steps_before_a_checkpoint_must_be_there(tmp_path: Path) -> None:
    _kept(tmp_path / "cache", steps=2)
    later = _cache(tmp_path / "cache")
    assert later.open(2) == ""
    assert later.open(3) == "2 of 10 samples are missing"
    with pytest.raises(PrefixCacheFailed, match="they were in no batch of the first epoch"):
        [later.rows(step, microbatch) for step in range(3, 6) for microbatch in range(2)]


@pytest.mark.parametrize(
    ("parts", "count", "reason"),
    [
        (
            {**PARTS, "model.factory": "other.py:build"},
            COUNT,
            "another model or dataset: model.factory is 'model.py:build'",
        ),
        (
            {**PARTS, "data.options.a": 1},
            COUNT,
            "it is of another model or dataset: data.options.a is None there, 1 here",
        ),
        (PARTS, COUNT + 1, "it is of another dataset: of 10 samples there, 11 here"),
    ],
)
def test_a_cache_of_another_model_or_dataset_is_named(
    parts: dict[str, object], count: int, reason: str, tmp_path: Path
) -> None:
    _kept(tmp_path / "cache")
    assert reason in _cache(tmp_path / "cache", parts, count).open(EPOCH)


@pytest.mark.parametrize("place", range(0, 240, 40))
def test_a_flipped_bit_of_any_row_is_found(place: int, tmp_path: Path) -> None:
    _kept(tmp_path / "cache").sync()
    file = tmp_path / "cache" / "leaf-0.rows"
    file.write_bytes(bytes(byte ^ (at == place) for at, byte in enumerate(file.read_bytes())))
    assert _cache(tmp_path / "cache").open(EPOCH).startswith("the rows of 1 of 10 samples are damaged")


def test_sample_shapes_that_vary_are_named_with_both(tmp_path: Path) -> None:
    cache = _cache(tmp_path / "cache")
    cache.keep(0, 0, torch.zeros(2, 5))
    with pytest.raises(
        PrefixCacheFailed, match=r"is float32 \[rows, 4\] in microbatch 1 of step 0, and was .*rows, 5\]"
    ):
        cache.keep(0, 1, torch.zeros(2, 4))
    with pytest.raises(
        PrefixCacheFailed, match=r"tensor 0 of what leaves the frozen .* the shape \[3, 5\], and the .* 2"
    ):
        cache.keep(0, 1, torch.zeros(3, 5))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many attempts to take space find the disk full, from now on."""
    left, plain = [0], os.posix_fallocate

    def take(file: int, start: int, size: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", take)
    return left


def test_a_full_disk_is_named_at_once_and_waited_for(full: list[int], tmp_path: Path) -> None:
    told: list[ResourceFault | None] = []
    waited: list[float] = []
    cache = _cache(tmp_path / "cache", note=told.append, wait=waited.append)
    full[0] = 2
    cache.keep(0, 0, torch.zeros(2, 5))
    assert len(waited) == 2
    assert told[0] is not None
    assert told[0].what == f"take 200 bytes for 10 samples in {tmp_path / 'cache'}"
    assert told[-1] is None
    assert cache.open(0) == ""


def test_a_disk_that_stays_full_ends_the_run_by_its_name(
    full: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "BOUND", 0.0)
    full[0] = 1
    with pytest.raises(PrefixCacheFailed, match=r"cannot take 200 bytes for 10 samples in .*: No space left on device"):
        _cache(tmp_path / "cache").keep(0, 0, torch.zeros(2, 5))


def test_what_could_not_be_synced_is_synced_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is tried again after a fault; it used to be reported then without its rows on the disk."""
    cache = _kept(tmp_path / "cache", 1)
    synced: list[int] = []

    def fsync(file: int) -> None:
        synced.append(file)
        if len(synced) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        cache.sync()
    cache.sync()
    first, *again = synced
    assert first in again
    assert len(again) > 1
    cache.sync()
    assert len(synced) == 1 + len(again)
