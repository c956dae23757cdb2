"""Generators follow from a key, unlike each other, and go on afterwards as if nothing had been drawn."""

import random

import numpy as np
import torch

from stageline.pipeline.data.loader import generators_kept, one_thread, seed_generators


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_the_same_key_draws_the_same_and_another_key_does_not() -> None:
    with generators_kept():
        seed_generators("40/epoch 2/sample 17")
        one = drawn()
        seed_generators("40/epoch 2/sample 17")
        assert drawn() == one
        seed_generators("40/epoch 2/sample 18")
        assert not set(drawn()) & set(one)
    assert len(set(one)) == 3


def test_the_numbers_drawn_for_a_key_are_the_ones_they_always_were() -> None:
    with generators_kept():
        seed_generators("40/epoch 2/sample 17")
        assert drawn() == (0.8595141768455505, 0.9347735344581972, 0.6165925685448421)


def test_afterwards_the_generators_go_on_as_before_also_after_an_error() -> None:
    before = drawn, torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    try:
        with generators_kept():
            seed_generators("key")
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]
    assert random.getstate() == before[3]


def test_one_thread_computes_within_and_as_many_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
