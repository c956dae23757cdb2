"""A batch arrives as it was sent, with its layout."""

import socket
import threading

import pytest
import torch

from stageline.pipeline.data import readers as frames
from stageline.pipeline.tree import Tree, leaves

BATCH: Tree = (
    {"image": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), "none": None},
    (torch.arange(2), torch.zeros(0, 3), torch.tensor(1 + 2j), torch.zeros(2, dtype=torch.bfloat16), "text", 1.5, True),
)


def test_a_batch_arrives_as_it_was_sent() -> None:
    here, there = socket.socketpair()
    with here, there:
        sending = threading.Thread(target=frames.send, args=(there, frames.encode(BATCH)))
        sending.start()
        received = frames.receive(here)
        sending.join()
    pairs = [*zip(leaves(BATCH), leaves(received), strict=True)]
    for (path, sent), (at, found) in pairs:
        assert path == at
        if isinstance(sent, torch.Tensor):
            assert torch.equal(sent, found)
            assert (sent.stride(), sent.dtype) == (found.stride(), found.dtype)
        else:
            assert sent == found
    assert isinstance(received, tuple)


def test_an_end_in_the_middle_of_a_batch_is_found() -> None:
    here, there = socket.socketpair()
    with here, there:
        frames.send(there, frames.encode(BATCH)[:2])
        there.close()
        with pytest.raises(frames.Ended):
            frames.receive(here)
