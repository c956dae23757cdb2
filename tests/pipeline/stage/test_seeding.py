"""The seed of a layer follows from its place and the microbatch alone."""

import pytest

from stageline.pipeline.stage.seeding import layer_seed

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_seed_of_a_layer_depends_on_its_place_alone():
    # The figures are the contract with every script that wants the same bits.
    assert layer_seed(0, 0, 0, 0) == 12803515573143611444
    assert layer_seed(1, 2, 3, 4) == 10246464913169517987
