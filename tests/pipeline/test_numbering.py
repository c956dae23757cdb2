"""Microbatches are numbered through the steps of a run."""

from stageline.pipeline.numbering import message_number, message_place


def test_numbers_go_on_from_step_to_step():
    places = [(step, microbatch) for step in range(3) for microbatch in range(4)]
    assert [message_number(*place, microbatches=4) for place in places] == list(range(12))
    assert [message_place(number, 4) for number in range(12)] == places
